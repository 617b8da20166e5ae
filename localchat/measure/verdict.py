"""Verdicts: whether a variant is as good as the first one, in words and by thresholds.

A threshold is a gate, for scripts: `--gate kl=0.02 --gate needles=0`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from localchat.errors import UsageError
from localchat.measure.records import TaskOutcome, VariantQuality

GRADES: Final = ("safe", "close", "weaker", "damaged")
_KL_LIMITS: Final = (0.01, 0.06, 0.25)
"""Mean KL divergence up to which a model is safe, close, weaker.

For most models Q8_0 and Q6_K are below the first limit, 4 to 5 bits below the second, 3 bits below the third.
"""
_PERPLEXITY_LIMITS: Final = (1.01, 1.04, 1.15)
"""Limits on the ratio of perplexities, for variants without a divergence."""
_TOKEN_BYTES: Final = 4
"""Length of a token, which most tokenizers come close to."""
_CHANCE: Final = 0.05
_NAMED_TASKS: Final = 3
_FEW_TASKS: Final = 6
"""Number of tasks below which even the loss of all of them may be chance."""
_RELIABLE_SHARE: Final = 0.9
"""Share of needles from which a model finds them reliably. Below it, which ones it finds is partly chance."""
_CLOSE: Final = GRADES.index("close")
_WEAKER: Final = GRADES.index("weaker")
_DAMAGED: Final = GRADES.index("damaged")
_MEANING: Final = {
    "safe": "safe",
    "close": "close: hardly different",
    "weaker": "weaker: use it only where memory demands it",
    "damaged": "damaged: do not use it",
}


class _Finding(NamedTuple):
    """Comparison of one test."""

    text: str
    grade: int
    """Index into GRADES."""
    few: bool = False
    """True if tasks were lost, but too few to exclude chance."""


def verdict(base: VariantQuality, other: VariantQuality) -> str:
    """Return the findings and a grade: `q4_0: no needle lost to 16,384 tokens; KL 0.003; safe`."""
    findings = _findings(base, other)
    if not findings:
        return f"{other.variant.name}: nothing could be compared"
    worst = _worst_grade(findings)
    meaning = _MEANING[worst]
    if any(finding.few for finding in findings):
        meaning += f"; too few tasks to exclude chance (ask more than {_FEW_TASKS})"
    return f"{other.variant.name}: {'; '.join(finding.text for finding in findings)}; {meaning}"


def verdicts(measured: Sequence[VariantQuality]) -> Iterator[str]:
    """Yield a verdict on each variant after the first, and the tests that show nothing."""
    if not measured:
        return
    base, *others = measured
    for other in others:
        yield verdict(base, other)
    failed = [
        name
        for name, tasks in (("needle", base.needles), ("JSON", base.json), ("tool", base.tools))
        if tasks and not any(task.passed for task in tasks)
    ]
    if failed and others:
        yield (
            f"{base.variant.name} itself passes no {' and no '.join(failed)} test, so that these show no loss"
        )


def grade(base: VariantQuality, other: VariantQuality) -> str | None:
    """Return the grade of a variant; None if nothing could be compared."""
    findings = _findings(base, other)
    if not findings:
        return None
    return _worst_grade(findings)


def _worst_grade(findings: Sequence[_Finding]) -> str:
    return GRADES[max(finding.grade for finding in findings)]


def _findings(base: VariantQuality, other: VariantQuality) -> list[_Finding]:
    findings = []
    if any(task.passed for task in base.needles):
        findings.append(_needle_finding(base.needles, other.needles))
    for name, base_tasks, other_tasks in (
        ("JSON", base.json, other.json),
        ("tool calls", base.tools, other.tools),
        ("questions", base.questions, other.questions),
    ):
        if any(task.passed for task in (*base_tasks, *other_tasks)):
            text = f"{name} {_passed(other_tasks)} of {len(other_tasks)} (first: {_passed(base_tasks)})"
            findings.append(_task_finding(text, base_tasks, other_tasks))
    findings += _text_findings(base, other)
    return findings


def _needle_text(base: Sequence[TaskOutcome], lost: Sequence[TaskOutcome]) -> str:
    if not lost:
        longest = max(task.length for task in base if task.passed)
        return f"no needle lost to {longest:,} tokens"
    shortest = min(task.length for task in lost)
    return f"{len(lost)} of {_passed(base)} needles lost, from {shortest:,} tokens on"


def _task_finding(text: str, base: Sequence[TaskOutcome], other: Sequence[TaskOutcome]) -> _Finding:
    """Grade lost tasks, less those won. Their words say whether chance may explain them."""
    lost = len(lost_tasks(base, other))
    won = len(lost_tasks(other, base))
    if lost <= won:
        return _Finding(text, 0)
    return _Finding(text, _WEAKER, few=_is_chance(lost, won))


def _needle_finding(base: Sequence[TaskOutcome], other: Sequence[TaskOutcome]) -> _Finding:
    """Grade lost needles.

    A lost needle counts if the first model finds them reliably, whatever the other model won. Otherwise even
    two runs of equal quality lose some to each other, so only a loss beyond chance counts.
    """
    lost = len(lost_tasks(base, other))
    if not lost:
        return _Finding(_needle_text(base, []), 0)
    won = len(lost_tasks(other, base))
    passed = _passed(base)
    if lost > won and not _is_chance(lost, won):
        return _Finding(_needle_text(base, lost_tasks(base, other)), _DAMAGED)
    if passed >= _RELIABLE_SHARE * len(base):
        return _Finding(_needle_text(base, lost_tasks(base, other)), _WEAKER, few=True)
    text = f"needles {_passed(other)} of {len(other)} (first: {passed})"
    if lost <= won:
        return _Finding(text, 0)
    return _Finding(text, _CLOSE, few=True)


def _is_chance(lost: int, won: int) -> bool:
    """Return True if as many changes in one direction may be chance, by a sign test."""
    total = lost + won
    chance = sum(math.comb(total, count) for count in range(lost, total + 1)) / 2.0**total
    return chance >= _CHANCE


def _text_findings(base: VariantQuality, other: VariantQuality) -> Iterator[_Finding]:
    """Compare the divergence over the text, or else the perplexities."""
    if other.divergence is not None:
        kl = other.divergence.kl_mean
        bound = "" if other.divergence.complete else " at least"
        yield _Finding(f"KL{bound} {kl:.2g}", _grade_of(kl, _KL_LIMITS))
    elif base.perplexity is not None and other.perplexity is not None:
        bits = other.perplexity.bits_per_byte
        base_bits = base.perplexity.bits_per_byte
        if base_bits > 0 and bits > 0:
            text = f"{bits:.3f} bits a byte of text (first: {base_bits:.3f})"
            ratio = 2 ** (_TOKEN_BYTES * (bits - base_bits))
            yield _Finding(text, _grade_of(ratio, _PERPLEXITY_LIMITS))


def _grade_of(value: float, limits: Sequence[float]) -> int:
    return sum(value > limit for limit in limits)


def _passed(tasks: Sequence[TaskOutcome]) -> int:
    return sum(task.passed for task in tasks)


def lost_tasks(base: Sequence[TaskOutcome], other: Sequence[TaskOutcome]) -> list[TaskOutcome]:
    """Return the tasks that the first variant passes and the other fails."""
    passed = {task.name for task in other if task.passed}
    return [task for task in base if task.passed and task.name not in passed]


_Measure = Callable[[VariantQuality, VariantQuality], float | None]


class _Limit(NamedTuple):
    """A figure that a gate can limit."""

    measure: _Measure
    """Compares the first variant with another; None if a test is missing."""
    about: str
    is_minimum: bool = False
    tasks: Callable[[VariantQuality], Sequence[TaskOutcome]] | None = None
    """Tasks whose losses are counted; None for other figures."""


def _perplexity_ratio(base: VariantQuality, other: VariantQuality) -> float | None:
    if base.perplexity is None or other.perplexity is None:
        return None
    # Bits per byte are comparable between models with different tokenizers.
    difference = other.perplexity.bits_per_byte - base.perplexity.bits_per_byte
    return float(2 ** (_TOKEN_BYTES * difference))


def _losses(about: str, tasks: Callable[[VariantQuality], Sequence[TaskOutcome]]) -> _Limit:
    def count(base: VariantQuality, other: VariantQuality) -> float | None:
        if not tasks(base) or not tasks(other):
            return None
        return len(lost_tasks(tasks(base), tasks(other)))

    return _Limit(count, about, tasks=tasks)


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
    "needles": _losses("most needles lost", lambda measured: measured.needles),
    "json": _losses("most JSON tasks lost", lambda measured: measured.json),
    "tools": _losses("most tool calls lost", lambda measured: measured.tools),
    "questions": _losses("most questions lost", lambda measured: measured.questions),
}
_GRADE: Final = "grade"


class Gate(NamedTuple):
    """Threshold of one figure."""

    name: str
    value: float
    """Limit, or the index of a grade."""


def parse_gates(arguments: Sequence[str]) -> tuple[Gate, ...]:
    """Parse `kl=0.02` and `grade=close`. Raises UsageError."""
    return tuple(map(_parse_gate, arguments))


def _parse_gate(argument: str) -> Gate:
    name, equals, text = argument.partition("=")
    name = name.strip()
    text = text.strip()
    if name == _GRADE and text in GRADES:
        return Gate(name, GRADES.index(text))
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if name not in _LIMITS or not equals or not 0 <= value < float("inf"):
        names = ", ".join(f"{key} ({limit.about})" for key, limit in _LIMITS.items())
        raise UsageError(
            f"--gate {argument}: expected NAME=NUMBER, or grade={'|'.join(GRADES)}",
            hint=f"names: {names}",
        )
    return Gate(name, value)


def failures(measured: Sequence[VariantQuality], gates: Sequence[Gate]) -> Iterator[str]:
    """Yield a sentence on each gate that a variant after the first misses. A missing test fails too."""
    for other in measured[1:]:
        for gate in gates:
            if problem := _failure(measured[0], other, gate):
                yield f"{other.variant.name}: {problem}"


def _failure(base: VariantQuality, other: VariantQuality, gate: Gate) -> str:
    """Return the reason why a variant misses a gate; empty if it passes."""
    if gate.name == _GRADE:
        reached = grade(base, other)
        if reached is None:
            return "nothing could be compared, so it has no grade"
        if GRADES.index(reached) <= gate.value:
            return ""
        return f"grade {reached}, allowed {GRADES[int(gate.value)]}"
    limit = _LIMITS[gate.name]
    value = limit.measure(base, other)
    if value is None:
        return f"{gate.name} was not measured"
    if limit.tasks is not None and not any(task.passed for task in limit.tasks(base)):
        return (
            f"{gate.name} cannot be judged, because {base.variant.name} passes none of them either"
        )
    if limit.is_minimum:
        passed = value >= gate.value
        bound = "at least"
    else:
        passed = value <= gate.value
        bound = "at most"
    if passed:
        return ""
    names = ""
    if limit.tasks is not None:
        names = f": {_names(lost_tasks(limit.tasks(base), limit.tasks(other)))}"
    return f"{gate.name} {value:.3g}, allowed {bound} {gate.value:g}{names}"


def _names(tasks: Sequence[TaskOutcome]) -> str:
    """Return the names of the first tasks of a list."""
    named = [task.name for task in tasks[:_NAMED_TASKS]]
    if len(tasks) > _NAMED_TASKS:
        named.append(f"and {len(tasks) - _NAMED_TASKS} more")
    return ", ".join(named)
