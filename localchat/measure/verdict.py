"""Verdicts in words: whether a variant is still as good as the first one."""

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from localchat.measure.quality_record import TaskOutcome, VariantQuality

GRADES: Final = ("safe", "close", "weaker", "damaged")
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


_FEW_TASKS: Final = 6
"""With fewer tasks, a loss of all of them may be chance."""


def verdict(base: VariantQuality, other: VariantQuality) -> str:
    """One sentence of findings and a judgement: `q4_0: no needle lost to 16,384 tokens; KL 0.003; safe`."""
    findings = _findings(base, other)
    if not findings:
        return f"{other.variant.name}: nothing could be compared"
    words = _MEANING[GRADES[max(found.grade for found in findings)]]
    equal = _equal_share(other)
    if words == _MEANING["close"] and equal is not None and equal < 0.5:
        words = "close in probabilities, but most greedy answers have other words"
    if any(found.few for found in findings):
        words += f"; too few tasks to tell (ask {_FEW_TASKS} or more)"
    return f"{other.variant.name}: {'; '.join(found.words for found in findings)}; {words}"


def grade(base: VariantQuality, other: VariantQuality) -> str | None:
    """The grade of a variant; None if nothing could be compared."""
    findings = _findings(base, other)
    if findings:
        return GRADES[max(found.grade for found in findings)]
    return None


class _Finding(NamedTuple):
    words: str
    grade: int
    """Place among the grades."""
    few: bool = False
    """Tasks were lost, and there are too few to exclude chance."""


def _findings(base: VariantQuality, other: VariantQuality) -> list[_Finding]:
    return [*_task_findings(base, other), *_greedy_finding(other), *_text_finding(base, other)]


def _task_findings(base: VariantQuality, other: VariantQuality) -> Iterator[_Finding]:
    if any(one.passed for one in base.needles):
        lost = lost_tasks(base.needles, other.needles)
        level = _task_grade(base.needles, other.needles, worst=3)
        yield _Finding(_needle_words(base.needles, lost), level, _too_few(base.needles, level))
    for name, one, two in (
        ("JSON", base.json, other.json),
        ("tool calls", base.tools, other.tools),
        ("questions", base.questions, other.questions),
    ):
        if any(task.passed for task in (*one, *two)):
            words = f"{name} {_right(two)} of {len(two)} (first: {_right(one)})"
            level = _task_grade(one, two, worst=2)
            yield _Finding(words, level, _too_few(one, level))


def _too_few(tasks: Sequence[TaskOutcome], level: int) -> bool:
    """Return True for losses that a sign test of so few tasks cannot tell from chance."""
    return level == 1 and _right(tasks) < _FEW_TASKS


def _greedy_finding(other: VariantQuality) -> Iterator[_Finding]:
    """Equal greedy texts. They do not lower the grade: near ties turn many texts of a good model."""
    if (share := _equal_share(other)) is not None:
        equal = round(share * len(other.greedy))
        yield _Finding(f"same greedy text {equal} of {len(other.greedy)}", 0)


def _equal_share(other: VariantQuality) -> float | None:
    if not other.greedy:
        return None
    return sum(text.same is None for text in other.greedy) / len(other.greedy)


def _text_finding(base: VariantQuality, other: VariantQuality) -> Iterator[_Finding]:
    """Divergence over a text, else the difference of perplexities."""
    if other.divergence is not None:
        about = "" if other.divergence.complete else " at least"
        kl = other.divergence.kl_mean
        yield _Finding(f"KL{about} {kl:.2g}", _grade(kl, _KL_LIMITS))
    elif base.perplexity is not None and other.perplexity is not None:
        first = base.perplexity.bits_per_byte
        second = other.perplexity.bits_per_byte
        if first > 0 and second > 0:
            words = f"{second:.3f} bits a byte of text (first: {first:.3f})"
            # Of a token of four bytes, which most tokenizers come near to.
            yield _Finding(words, _grade(2 ** (4 * (second - first)), _PERPLEXITY_LIMITS))


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


def lost_tasks(base: Sequence[TaskOutcome], other: Sequence[TaskOutcome]) -> list[TaskOutcome]:
    """Tasks of the first variant that the other fails."""
    passed = {task.name for task in other if task.passed}
    return [task for task in base if task.passed and task.name not in passed]


def _task_grade(base: Sequence[TaskOutcome], other: Sequence[TaskOutcome], worst: int) -> int:
    """0: nothing lost; 1: losses that may be chance; `worst`: more than chance explains."""
    lost = len(lost_tasks(base, other))
    won = len(lost_tasks(other, base))
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
