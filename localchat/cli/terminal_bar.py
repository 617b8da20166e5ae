"""Progress bar with a text, in the last line of a terminal's stderr. It is created when first shown."""

import sys
from typing import TYPE_CHECKING, Self

from localchat.cli.streams import Terminal
from localchat.sanitize import sanitize_line

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class TerminalBar:
    """Progress bar. `close` removes it; sentences above it stay."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._shown: tuple[Progress, TaskID] | None = None

    def update(
        self, words: str, *, completed: float | None = None, total: float | None = None
    ) -> None:
        """Show the text and the progress. None leaves a number as it was."""
        bar, task = self._drawn()
        bar.update(task, completed=completed, total=total, text=words)

    @property
    def is_shown(self) -> bool:
        """True between the first update and `close`."""
        return self._shown is not None

    def say(self, words: str) -> None:
        """Print a sentence above the bar."""
        bar, _ = self._drawn()
        sentence = f"localchat: {sanitize_line(words)}"
        bar.console.print(sentence, style="dim", markup=False, highlight=False)

    def close(self) -> None:
        """Remove the bar. Idempotent."""
        if self._shown is not None:
            self._shown[0].stop()
            self._shown = None

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


class ProgressDisplay:
    """Progress on stderr: a bar on a terminal, a line every ten seconds elsewhere. A context manager."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._bar = TerminalBar(terminal) if terminal.animated else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the progress. The next status shows it again."""
        if self._bar is None:
            self._terminal.progress("")
        else:
            self._bar.close()

    def status(self, text: str, done: float | None = None, total: float | None = None) -> None:
        """Show the current step. Numbers that are None stay as they were."""
        if self._bar is None:
            self._terminal.progress(text)
        else:
            self._bar.update(text, completed=done, total=total)

    def say(self, sentence: str) -> None:
        """Print a sentence that stays."""
        if self._bar is None or not self._bar.is_shown:
            self._terminal.notify(sentence)
        else:
            self._bar.say(sentence)
