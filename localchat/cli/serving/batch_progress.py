"""Progress of a batch: a bar on a terminal, occasional lines elsewhere."""

from localchat.batch.run import BatchProgress
from localchat.cli.terminal_bar import ProgressDisplay
from localchat.units import duration, rate

_MIN_LINES = 3
"""Number of answers from which the remaining time can be estimated."""


class BatchDisplay(ProgressDisplay):
    """Progress of a batch on stderr."""

    def show(self, progress: BatchProgress) -> None:
        """Show the progress. Called after each line."""
        self.status(progress_words(progress), progress.done, progress.total)


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
