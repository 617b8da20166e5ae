"""Patterns of JSON schemas, in a spelling that llguidance reads."""

import re
from typing import Final

_PLAIN: Final = (
    (re.compile(r"(\\[dDsSwW])-(?!\])"), r"\1\\-"),
    (re.compile(r"(?<!\\)-(?=\\[dDsSwW])"), r"\\-"),
    (re.compile(r"\[\^\]"), r"[\\s\\S]"),
)
"""Hyphens beside a character class, and any character, in a form that all dialects accept."""


def plain_pattern(pattern: str) -> str:
    """Return a pattern in a spelling that more dialects read."""
    for syntax, replacement in _PLAIN:
        pattern = syntax.sub(replacement, pattern)
    return pattern
