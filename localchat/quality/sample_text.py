"""Sample text of the package for perplexity and divergence: prose, code, dialogue, tables, other languages."""

from importlib.resources import files
from typing import Final

NAME: Final = "sample text"


def sample_text() -> str:
    """The text, which was written for this."""
    return files("localchat.quality").joinpath("text.txt").read_text("utf-8")
