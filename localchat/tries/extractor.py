"""Extractors: find what an answer says, so that answers in different words can be counted together."""

import json
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Final, TypeAlias

from localchat.errors import UsageError

Extractor: TypeAlias = Callable[[str], str | None]
"""Text of a whole answer in, what it says out; None: it says nothing that can be counted."""

_NUMBER: Final = re.compile(r"(?:(?<![\w.)])[-\u2212])?\d+(?:,\d{3})*(?:\.\d+)?")
_KINDS: Final = "number, text, field:NAME or regex:PATTERN"


def extractor(kind: str) -> Extractor:
    """The extractor that `kind` names: number, text, field:NAME or regex:PATTERN. Raises UsageError."""
    name, _, argument = kind.partition(":")
    match name:
        case "number" if not argument:
            return last_number
        case "text" if not argument:
            return folded_text
        case "field" if argument:
            return lambda text: json_field(text, argument)
        case "regex" if argument:
            return _matcher(argument)
    raise UsageError(f"a vote cannot be counted by {kind[:80]!r}", hint=f"it takes {_KINDS}")


def last_number(text: str) -> str | None:
    """The last number of a text, without commas and trailing zeros: `1,250.50` is `1250.5`."""
    found = _NUMBER.findall(text)
    if not found:
        return None
    number = Decimal(found[-1].replace(",", "").replace("\u2212", "-")).normalize()
    return f"{number + 0:f}"  # + 0: there is no minus zero


def folded_text(text: str) -> str | None:
    """The whole text in lower case, with single spaces and without a full stop at its end."""
    return " ".join(text.casefold().split()).rstrip(".") or None


def json_field(text: str, path: str) -> str | None:
    """A field of the first JSON value of a text, as JSON. `path`: names and indices, parted by dots."""
    value = _json_value(text)
    for part in path.split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def json_text(text: str) -> str | None:
    """The first JSON value of a text, written in one way."""
    value = _json_value(text)
    if value is None:
        return None
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _json_value(text: str) -> object:
    """The first object or list of a text; None if there is none that is whole."""
    decoder = json.JSONDecoder()
    for start in re.finditer(r"[{\[]", text):
        try:
            return decoder.raw_decode(text, start.start())[0]
        except (ValueError, RecursionError):
            continue
    return None


def _matcher(pattern: str) -> Extractor:
    try:
        compiled = re.compile(pattern, re.MULTILINE)
    except re.error as problem:
        raise UsageError(
            f"{pattern!r} is no regular expression: {problem}", hint="in Python's syntax"
        ) from problem

    def last_match(text: str) -> str | None:
        found = list(compiled.finditer(text))
        if not found:
            return None
        return str(found[-1].group(1 if compiled.groups else 0) or "").strip() or None

    return last_match
