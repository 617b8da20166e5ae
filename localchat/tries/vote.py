"""Vote: extract what each try answers, count equal answers, and find the leader."""

import json
import re
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from typing import Final, TypeAlias

from localchat.errors import UsageError

Extractor: TypeAlias = Callable[[str], str | None]
"""Returns what a complete text answers, or None if it contains nothing to count."""

_NUMBER: Final = re.compile(r"(?:(?<![\w.)])[-\u2212])?\d+(?:,\d{3})*(?:\.\d+)?")
_KINDS: Final = "number, text, field:NAME or regex:PATTERN"


class Vote:
    """Counts the answers of a fixed number of tries."""

    def __init__(self, tries: int) -> None:
        self.tries = tries
        self.answers: dict[int, str | None] = {}
        """Answers of the tries that have ended. None if a try contains no answer."""

    def add(self, number: int, answer: str | None) -> None:
        """Record the answer of a try. `number` counts tries from 0."""
        self.answers[number] = answer

    @property
    def counts(self) -> Counter[str]:
        """Votes by answer."""
        return Counter(answer for answer in self.answers.values() if answer is not None)

    @property
    def open(self) -> int:
        """Number of tries that have not ended."""
        return self.tries - len(self.answers)

    @property
    def decided(self) -> bool:
        """Return True if no open try can change the leader any more."""
        if not self.open:
            return True
        # All open tries may agree with the second answer. Two entries stand in for missing answers.
        (_, first), (_, second) = [*self.counts.most_common(2), ("", 0), ("", 0)][:2]
        return first > second + self.open

    @property
    def leader(self) -> str | None:
        """Answer with the most votes. The lowest try breaks a tie. None without any vote."""
        counts = self.counts
        if not counts:
            return None
        max_votes = max(counts.values())
        return next(
            answer
            for _, answer in sorted(self.answers.items())
            if answer is not None and counts[answer] == max_votes
        )

    @property
    def chosen(self) -> int:
        """Lowest try with the leading answer. Without any vote, the lowest that has ended, or 0."""
        leader = self.leader
        return min(
            (number for number, answer in self.answers.items() if answer == leader), default=0
        )


def extractor(kind: str) -> Extractor:
    """Return the extractor for number, text, field:NAME or regex:PATTERN. Raise UsageError for others."""
    name, _, argument = kind.partition(":")
    match name:
        case "number" if not argument:
            return last_number
        case "text" if not argument:
            return folded_text
        case "field" if argument:
            return lambda text: json_field(text, argument)
        case "regex" if argument:
            return _last_match(argument)
    raise UsageError(f"a vote cannot be counted by {kind[:80]!r}", hint=f"use {_KINDS}")


def last_number(text: str) -> str | None:
    """Return the last number of a text without commas and trailing zeros: `1,250.50` becomes `1250.5`."""
    matches = _NUMBER.findall(text)
    if not matches:
        return None
    number = Decimal(matches[-1].replace(",", "").replace("\u2212", "-")).normalize()
    return f"{number + 0:f}"  # adding 0 turns -0 into 0


def folded_text(text: str) -> str | None:
    """Return the text in lower case, with single spaces and without a final full stop."""
    return " ".join(text.casefold().split()).rstrip(".") or None


def json_field(text: str, path: str) -> str | None:
    """Return a field of the first JSON value in a text, as JSON. `path` joins keys and indices by dots."""
    value = _first_json_value(text)
    for part in path.split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            return None
    return _canonical_json(value)


def json_text(text: str) -> str | None:
    """Return the first JSON value in a text, with sorted keys."""
    value = _first_json_value(text)
    if value is None:
        return None
    return _canonical_json(value)


def _canonical_json(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _first_json_value(text: str) -> object:
    """Return the first complete object or list in a text, or None."""
    decoder = json.JSONDecoder()
    for start in re.finditer(r"[{\[]", text):
        try:
            return decoder.raw_decode(text, start.start())[0]
        except (ValueError, RecursionError):
            continue
    return None


def _last_match(pattern: str) -> Extractor:
    try:
        compiled = re.compile(pattern, re.MULTILINE)
    except re.error as problem:
        raise UsageError(
            f"{pattern!r} is not a valid regular expression: {problem}", hint="use Python's syntax"
        ) from problem

    def last_match(text: str) -> str | None:
        matches = list(compiled.finditer(text))
        if not matches:
            return None
        group = 1 if compiled.groups else 0
        return str(matches[-1].group(group) or "").strip() or None

    return last_match
