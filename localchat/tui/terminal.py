"""What can be known of the terminal behind Textual's driver. Uses parts of Textual that are not public; the
version is pinned."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from textual.app import App


def writer_is_behind(app: "App[object]") -> bool:
    """Whether drawings wait because the terminal has not read earlier ones. Thirty may wait, the next one
    then holds the whole program."""
    writer = getattr(app._driver, "_writer_thread", None)
    return writer is not None and writer._queue.qsize() > 1
