"""Keeps a key that comes before Textual's command palette is laid out from ending the program.

Private Textual API: `CommandPalette._action_command_list`.
"""

from textual.command import CommandList, CommandPalette


class ChatPalette(CommandPalette):
    """Textual's palette, whose page keys raise KeyError while its list has no width."""

    def _action_command_list(self, action: str) -> None:
        if self.query_one(CommandList).size.width or not action.startswith("page_"):
            super()._action_command_list(action)
