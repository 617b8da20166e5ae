"""Cause of an engine's notice, so that a front end shows one notice per cause."""

import re
from typing import Final

_NUMBER: Final = re.compile(r"\d[\d,.]*")


def notice_cause(sentence: str) -> str:
    """Return the first sentence of a notice without numbers, which change between notices."""
    return _NUMBER.sub("0", sentence.partition(". ")[0])
