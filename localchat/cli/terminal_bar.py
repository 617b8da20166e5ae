"""Progress on stderr: a bar with a text on a terminal, a line every ten seconds elsewhere."""

import sys
from typing import TYPE_CHECKING, Self

from localchat.cli.streams import Terminal
from localchat.sanitize import sanitize_line

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class ProgressDisplay:
    """Progress of a command. A context manager, which removes the progress at its end."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._shown: tuple[Progress, TaskID] | None = None
        """Bar in the last line of the terminal, created when first shown."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the progress. The next status shows it again."""
        if not self._terminal.animated:
            self._terminal.progress("")
        if self._shown is not None:
            self._shown[0].stop()
            self._shown = None

    def status(self, text: str, done: float | None = None, total: float | None = None) -> None:
        """Show the current step. Numbers that are None stay as they were."""
        if not self._terminal.animated:
            self._terminal.progress(text)
            return
        bar, task = self._drawn()
        bar.update(task, completed=done, total=total, text=text)

    def say(self, sentence: str) -> None:
        """Print a sentence that stays."""
        if self._shown is None:
            self._terminal.notify(sentence)
            return
        console = self._shown[0].console
        text = f"localchat: {sanitize_line(sentence)}"
        console.print(text, style="dim", markup=False, highlight=False)

    def _drawn(self) -> "tuple[Progress, TaskID]":
        if self._shown is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            colored = self._terminal.colored
            console = Console(file=sys.stderr, force_terminal=True, no_color=not colored)
            text = TextColumn("{task.fields[text]}", markup=False)
            bar = Progress(BarColumn(bar_width=20), text, console=console, transient=True)
            self._shown = bar, bar.add_task("", total=None, text="")
            bar.start()
        return self._shown
