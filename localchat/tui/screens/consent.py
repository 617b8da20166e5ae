"""Consent to a tool call on the screen."""

import time
from typing import ClassVar, Final

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from localchat.sanitize import sanitize_line
from localchat.tools.consent import EFFECTS, Decision
from localchat.tools.tool import Plan, Tool

_CALM_S: Final = 0.7
"""Pause before a key that is an answer. Without one, the user is still typing something else."""
_MOVES: Final = ("up", "down", "home", "end", "pageup", "pagedown")


class ConsentScreen(ModalScreen[Decision]):
    """Shows a call with its preview. Returns the decision; leaving the screen refuses the call."""

    AUTO_FOCUS = "#answers"
    CSS_PATH = "dialog.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "decide('once')", show=False),
        Binding("s", "decide('session')", show=False),
        Binding("n,escape", "decide('no')", show=False),
        Binding("pagedown", "scroll_preview(1)", show=False, priority=True),
        Binding("pageup", "scroll_preview(-1)", show=False, priority=True),
    ]

    def __init__(self, tool: Tool, plan: Plan) -> None:
        super().__init__()
        self._preview = plan.preview or plan.title
        self._last_key_s = time.monotonic()
        self._pause_s = 0.0
        """Time without a key before the last one."""
        effect, _, about_undo = EFFECTS[tool.effect].partition("; ")
        self._title = f"{sanitize_line(tool.name)} may {effect}"
        allow = "y  Allow this call"
        if about_undo:
            allow += f"; {about_undo}"
        self._answers: dict[Decision, str] = {
            "once": allow,
            "session": f"s  Allow {sanitize_line(plan.scope_text)} from now on",
            "no": "n  Refuse this call",
            "never": "   Refuse all such calls in this conversation",
        }

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog", classes="-small -consent") as box:
            box.border_title = Content(self._title)
            box.border_subtitle = Content("Enter choose · PgUp PgDn scroll · Esc refuse")
            with VerticalScroll(id="preview", can_focus=False):
                yield Static(_colored(self._preview), markup=False)
            yield OptionList(
                *(Option(Content(text), id=decision) for decision, text in self._answers.items()),
                id="answers",
                markup=False,
            )

    def on_mount(self) -> None:
        self.query_one(OptionList).highlighted = 0

    def on_key(self, event: events.Key) -> None:
        """Measure the pause before a key. It is called before the key's own action."""
        if event.key in _MOVES:
            return
        now_s = time.monotonic()
        self._pause_s = now_s - self._last_key_s
        self._last_key_s = now_s

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.action_decide(list(self._answers)[event.option_index])

    def action_decide(self, decision: Decision) -> None:
        # A click has no key before it, so the time since the last key counts as well.
        pause_s = max(self._pause_s, time.monotonic() - self._last_key_s)
        if pause_s >= _CALM_S:
            self.dismiss(decision)

    def action_scroll_preview(self, pages: int) -> None:
        preview = self.query_one("#preview")
        preview.scroll_relative(y=pages * max(1, preview.size.height - 1), animate=False)


def _colored(preview: str) -> Content:
    """Color the lines of a unified diff. All other text is plain, without control characters."""
    styles = {"+": "$success", "-": "$error", "@": "$text-muted"}
    lines = []
    for line in preview.split("\n"):
        lines.append(Content.styled(sanitize_line(line) or " ", styles.get(line[:1], "")))
    return Content("\n").join(lines)
