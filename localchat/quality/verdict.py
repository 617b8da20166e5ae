"""Verdicts in words: whether a variant is still as good as the first one."""

import math
from collections.abc import Iterator, Sequence
from typing import Final

from localchat.quality.record import TaskOutcome, VariantQuality

_GRADES: Final = ("safe", "close", "weaker", "damaged")
_KL_LIMITS: Final = (0.01, 0.06, 0.25)
"""Mean KL divergence up to which a model is safe, close, weaker. Q8_0 and Q6_K of most models lie below the
first, 4 to 5 bits below the second, 3 bits below the third."""
_PERPLEXITY_LIMITS: Final = (1.01, 1.04, 1.15)
"""The same as a ratio of perplexities, where no divergence is known."""
_CHANCE: Final = 0.05
_MEANING: Final = {
    "safe": "safe",
    "close": "close: most answers stay the same",
    "weaker": "weaker: use it only where memory demands it",
    "damaged": "damaged: do not use it",
}


def verdict(base: VariantQuality, other: VariantQuality) -> str:
    """One sentence of findings and a judgement: `q4_0: no needle lost to 16,384 tokens; KL 0.003; safe`."""
    findings, grades = [], [0]
    lost_needles = _lost(base.needles, other.needles)
    if any(one.passed for one in base.needles):
        findings.append(_needle_words(base.needles, lost_needles))
        grades.append(_task_grade(base.needles, other.needles, worst=3))
    for name, one, two in (
        ("JSON", base.json, other.json),
        ("tool calls", base.tools, other.tools),
        ("questions", base.questions, other.questions),
    ):
        if any(task.passed for task in (*one, *two)):
            findings.append(f"{name} {_right(two)} of {len(two)} (first: {_right(one)})")
            grades.append(_task_grade(one, two, worst=2))
    measured = bool(findings)
    if other.divergence is not None:
        about = "" if other.divergence.complete else " at least"
        findings.append(f"KL{about} {other.divergence.kl_mean:.2g}")
        grades.append(_grade(other.divergence.kl_mean, _KL_LIMITS))
    elif base.perplexity is not None and other.perplexity is not None:
        first, second = base.perplexity.bits_per_byte, other.perplexity.bits_per_byte
        if first > 0 and second > 0:
            findings.append(f"{second:.3f} bits a byte of text (first: {first:.3f})")
            # Of a token of four bytes, which most tokenizers come near to.
            grades.append(_grade(2 ** (4 * (second - first)), _PERPLEXITY_LIMITS))
    elif not measured:
        return f"{other.variant.name}: nothing could be compared"
    return f"{other.variant.name}: {'; '.join(findings)}; {_MEANING[_GRADES[max(grades)]]}"


def verdicts(measured: Sequence[VariantQuality]) -> Iterator[str]:
    """A verdict for each variant after the first, and what to take."""
    if not measured:
        return
    base, *others = measured
    for other in others:
        yield verdict(base, other)
    silent = [
        name
        for name, tasks in (("needle", base.needles), ("JSON", base.json), ("tool", base.tools))
        if tasks and not any(task.passed for task in tasks)
    ]
    if silent and others:
        yield (
            f"{base.variant.name} itself passes no {' and no '.join(silent)} test, so that these show no loss"
        )


def _grade(value: float, limits: Sequence[float]) -> int:
    return sum(value > limit for limit in limits)


def _right(tasks: Sequence[TaskOutcome]) -> int:
    return sum(task.passed for task in tasks)


def _lost(base: Sequence[TaskOutcome], other: Sequence[TaskOutcome]) -> list[TaskOutcome]:
    """Tasks of the first variant that the other fails."""
    passed = {task.name for task in other if task.passed}
    return [task for task in base if task.passed and task.name not in passed]


def _task_grade(base: Sequence[TaskOutcome], other: Sequence[TaskOutcome], worst: int) -> int:
    """0: nothing lost; 1: losses that may be chance; `worst`: more than chance explains."""
    lost, won = len(_lost(base, other)), len(_lost(other, base))
    if lost <= won:
        return 0
    total = lost + won
    chance = sum(math.comb(total, at) for at in range(lost, total + 1)) / 2**total
    return worst if chance < _CHANCE else 1


def _needle_words(base: Sequence[TaskOutcome], lost: Sequence[TaskOutcome]) -> str:
    if not lost:
        longest = max(task.length for task in base if task.passed)
        return f"no needle lost to {longest:,} tokens"
    found = _right(base)
    first = min(task.length for task in lost)
    return f"{len(lost)} of {found} needles lost, from {first:,} tokens on"
