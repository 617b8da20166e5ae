"""Patterns of JSON schemas: which are regular expressions, and which the grammar merely cannot enforce."""

import re
import warnings
from functools import lru_cache
from typing import Final

_PLAIN: Final = (
    (re.compile(r"(\\[dDsSwW])-(?!\])"), r"\1\\-"),
    (re.compile(r"(?<!\\)-(?=\\[dDsSwW])"), r"\\-"),
    (re.compile(r"\[\^\]"), r"[\\s\\S]"),
)
"""Hyphens beside a character class, and any character, in a form that all dialects accept."""
_ECMASCRIPT: Final = (
    (re.compile(r"\(\?<(?=[A-Za-z_$])"), "(?P<"),
    (re.compile(r"\\k<(\w+)>"), r"(?P=\1)"),
    (re.compile(r"\\[pP]\{[\w=]+\}"), r"\\w"),
    (re.compile(r"\\u\{0*([0-9a-fA-F]{1,6})\}"), "x"),
    (re.compile(r"\\c[A-Za-z]"), "x"),
    (re.compile(r"\[\]"), r"[^\\s\\S]"),
)
"""Syntax of ECMAScript only, with a replacement of the same shape in Python."""
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)
_PYTHON_ESCAPES: Final = frozenset("0123456789AbBdDsSwWZafnrtvxuUN")
_LIMITS_OF_PYTHON: Final = ("look-behind requires fixed-width", "global flags not at the start")
"""Faults that only Python reports."""
_NO_WHOLE: Final = ("bad escape (end of pattern)", "unbalanced parenthesis", "missing )")
"""Faults that only a part of a larger pattern may have."""


@lru_cache(1024)
def pattern_fault(pattern: str) -> str:
    """Return why a pattern is not a regular expression of ECMAScript or Python. Empty: it is."""
    fault = ""
    for spelling in (pattern, _as_python(plain_pattern(pattern))):
        fault = _python_fault(spelling)
        if not fault:
            return ""
    return fault


def is_part(pattern: str) -> bool:
    """Return True for a pattern that is valid only inside a larger one: `a)(b`, or a final backslash.

    llguidance reads patterns inside a group, so it would accept them.
    """
    return pattern_fault(pattern).startswith(_NO_WHOLE)


def plain_pattern(pattern: str) -> str:
    """Return a pattern in a spelling that more dialects read."""
    for syntax, replacement in _PLAIN:
        pattern = syntax.sub(replacement, pattern)
    return pattern


def _as_python(pattern: str) -> str:
    for syntax, replacement in _ECMASCRIPT:
        pattern = syntax.sub(replacement, pattern)
    return _ESCAPE.sub(_known_escape, pattern)


def _known_escape(escape: re.Match[str]) -> str:
    """Return the character of an escape that Python does not know, as ECMAScript reads it."""
    character = escape[1]
    if character in _PYTHON_ESCAPES or not character.isalpha():
        return escape[0]
    return re.escape(character)


def _python_fault(pattern: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        message = str(error)
        return "" if message.startswith(_LIMITS_OF_PYTHON) else message
    return ""
