"""Sample text of the package: prose, code, tables, dialogue and other languages, written for this project."""

import re
from functools import cache
from importlib.resources import files
from typing import Final

NAME: Final = "sample text"

_SENTENCE: Final = re.compile(
    r"(?:(?<=[.?!]\s)|(?<=\n))[A-Z][A-Za-z0-9 ,;:'()%-]{24,260}[.?!](?=\s)"
)
"""A sentence of plain words: no code, no markup, no table."""


def sample_text() -> str:
    """Return the text, of about 60 kB."""
    return files("localchat.measure").joinpath("text.txt").read_text("utf-8")


@cache
def sample_sentences() -> tuple[str, ...]:
    """Return the plain English sentences of the text."""
    sentences = _SENTENCE.findall(sample_text())
    return tuple(dict.fromkeys(sentence.replace("\n", " ") for sentence in sentences))
