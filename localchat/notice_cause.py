"""Cause of an engine's remark, so that a front end shows one remark for each."""

import re
from typing import Final

_NUMBER: Final = re.compile(r"\d[\d,.]*")


def notice_cause(sentence: str) -> str:
    """Cause of a remark: its first sentence without numbers, which change from one to the next."""
    return _NUMBER.sub("0", sentence.partition(". ")[0])
