"""Thresholds that a compared model must meet, for scripts: `--gate kl=0.02 --gate needles=0`."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from localchat.errors import UsageError
from localchat.measure.quality_record import TaskOutcome, VariantQuality
from localchat.measure.verdict import GRADES, grade, lost_tasks

_Measure = Callable[[VariantQuality, VariantQuality], float | None]


class _Limit(NamedTuple):
    """A figure that a gate can limit."""

    measure: _Measure
    """Takes the first model and another; None if it was not measured."""
    about: str
    is_minimum: bool = False


def _lost(select: Callable[[VariantQuality], Sequence[TaskOutcome]]) -> _Measure:
    def count(base: VariantQuality, other: VariantQuality) -> float | None:
        if not select(base) or not select(other):
            return None
        return len(lost_tasks(select(base), select(other)))

    return count


def _perplexity_ratio(base: VariantQuality, other: VariantQuality) -> float | None:
    if base.perplexity is None or other.perplexity is None:
        return None
    # Bits a byte compare models of different tokenizers too; a token has about four bytes.
    difference = other.perplexity.bits_per_byte - base.perplexity.bits_per_byte
    return float(2 ** (4 * difference))


def _same_text_share(base: VariantQuality, other: VariantQuality) -> float | None:
    if not base.greedy or not other.greedy:
        return None
    return sum(text.same is None for text in other.greedy) / len(other.greedy)


_LIMITS: Final[dict[str, _Limit]] = {
    "kl": _Limit(
        lambda base, other: other.divergence.kl_mean if other.divergence else None,
        "largest mean KL divergence",
    ),
    "top1": _Limit(
        lambda base, other: other.divergence.same_top_share if other.divergence else None,
        "smallest top-1 agreement, from 0 to 1",
        is_minimum=True,
    ),
    "perplexity": _Limit(_perplexity_ratio, "largest ratio to the first model's perplexity"),
    "greedy": _Limit(_same_text_share, "smallest share of equal greedy texts", is_minimum=True),
    "needles": _Limit(_lost(lambda one: one.needles), "most needles lost"),
    "json": _Limit(_lost(lambda one: one.json), "most JSON tasks lost"),
    "tools": _Limit(_lost(lambda one: one.tools), "most tool calls lost"),
    "questions": _Limit(_lost(lambda one: one.questions), "most questions lost"),
}
_GRADE: Final = "grade"


class Gate(NamedTuple):
    """One threshold."""

    name: str
    value: float
    """Of a grade: its place among the grades."""


def parse_gates(words: Sequence[str]) -> tuple[Gate, ...]:
    """Parse `kl=0.02` and `grade=close`. Raises UsageError."""
    return tuple(_parse(word) for word in words)


def _parse(word: str) -> Gate:
    name, equals, text = word.partition("=")
    name = name.strip()
    text = text.strip()
    if name == _GRADE and text in GRADES:
        return Gate(name, GRADES.index(text))
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if name not in _LIMITS or not equals or not 0 <= value < float("inf"):
        known = ", ".join(f"{key} ({limit.about})" for key, limit in _LIMITS.items())
        raise UsageError(
            f"--gate {word}: expected NAME=NUMBER, or grade={'|'.join(GRADES)}",
            hint=f"names: {known}",
        )
    return Gate(name, value)


def failures(measured: Sequence[VariantQuality], gates: Sequence[Gate]) -> Iterator[str]:
    """Sentences on thresholds that a variant after the first misses. What was not measured fails too."""
    for other in measured[1:]:
        for gate in gates:
            if problem := _failure(measured[0], other, gate):
                yield f"{other.variant.name}: {problem}"


def _failure(base: VariantQuality, other: VariantQuality, gate: Gate) -> str:
    """Why a variant misses a threshold; empty if it meets it."""
    if gate.name == _GRADE:
        found = grade(base, other)
        allowed = GRADES[int(gate.value)]
        if found is None:
            return "nothing could be compared, so it has no grade"
        if GRADES.index(found) <= gate.value:
            return ""
        return f"grade {found}, allowed {allowed}"
    limit = _LIMITS[gate.name]
    value = limit.measure(base, other)
    if value is None:
        return f"{gate.name} was not measured"
    is_met = value >= gate.value if limit.is_minimum else value <= gate.value
    word = "at least" if limit.is_minimum else "at most"
    if is_met:
        return ""
    return f"{gate.name} {value:.3g}, allowed {word} {gate.value:g}"
