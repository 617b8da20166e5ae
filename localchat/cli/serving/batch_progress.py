"""Progress of a batch: a bar on a terminal, occasional lines elsewhere."""

from localchat.batch.run import BatchProgress
from localchat.cli.streams import Terminal
from localchat.cli.terminal_bar import TerminalBar
from localchat.units import duration, rate

_MIN_LINES = 3
"""Number of answers from which the remaining time can be estimated."""


class BatchLines:
    """Writes sentences to stderr. It is a context manager around the run."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    def __enter__(self) -> "BatchLines":
        return self

    def __exit__(self, *_: object) -> None:
        self._terminal.progress("")

    def status(self, words: str) -> None:
        """Show what the run waits for."""
        self._terminal.progress(words)

    def show(self, progress: BatchProgress) -> None:
        """Show the progress. Called after each line."""
        self._terminal.progress(progress_words(progress))

    def say(self, words: str) -> None:
        """Print a sentence that stays."""
        self._terminal.notify(words)


class BatchBar(BatchLines):
    """Draws a progress bar for all lines of the run."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(terminal)
        self._bar = TerminalBar(terminal)

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def status(self, words: str) -> None:
        self._bar.update(words)

    def show(self, progress: BatchProgress) -> None:
        self._bar.update(progress_words(progress), completed=progress.done, total=progress.total)

    def say(self, words: str) -> None:
        self._bar.say(words)


def batch_progress_for(terminal: Terminal) -> BatchLines:
    """Return the progress view that suits stderr."""
    if terminal.animated:
        return BatchBar(terminal)
    return BatchLines(terminal)


def progress_words(progress: BatchProgress) -> str:
    """Return a text such as `120 of 5,000 lines, 340.0 tok/s, 2 failed`."""
    elapsed_s = progress.elapsed_s
    words = [f"{progress.done:,} of {progress.total:,} lines"]
    if elapsed_s > 0 and progress.done:
        tokens = progress.completion_tokens or progress.prompt_tokens
        words.append(rate(tokens / elapsed_s))
    if _MIN_LINES <= progress.done < progress.total:
        left_s = elapsed_s / progress.done * (progress.total - progress.done)
        words.append(f"about {duration(left_s)} left")
    if progress.failed:
        words.append(f"{progress.failed:,} failed")
    return ", ".join(words)
