"""Progress of a comparison of quality: a bar on a terminal, occasional lines elsewhere."""

import time

from localchat.cli.streams import Terminal
from localchat.cli.terminal_bar import TerminalBar
from localchat.measure.comparison import QualityProgress
from localchat.units import duration


class QualityLines:
    """Sentences on stderr. A context manager that lasts as long as the comparison."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._began_s = time.monotonic()

    def __enter__(self) -> "QualityLines":
        return self

    def __exit__(self, *_: object) -> None:
        self._terminal.progress("")

    def show(self, progress: QualityProgress) -> None:
        """Show how far the comparison is."""
        self._terminal.progress(self._words(progress))

    def _words(self, progress: QualityProgress) -> str:
        words = f"{progress.variant}: {progress.what}"
        if not progress.done:
            return words
        spent_s = time.monotonic() - self._began_s
        left_s = spent_s / progress.done * (progress.total - progress.done)
        return f"{words} · about {duration(left_s)} left"


class QualityBar(QualityLines):
    """A bar over all steps with the time left."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(terminal)
        self._bar = TerminalBar(terminal)

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, progress: QualityProgress) -> None:
        self._bar.update(
            self._words(progress), completed=progress.done, total=progress.total or None
        )


def quality_progress_for(terminal: Terminal) -> QualityLines:
    """The progress that fits stderr."""
    if terminal.animated:
        return QualityBar(terminal)
    return QualityLines(terminal)
