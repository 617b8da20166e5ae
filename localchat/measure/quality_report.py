"""Results of quality in words and tables."""

from collections.abc import Iterator, Sequence

from localchat.measure.quality_record import QualityRecord, TaskOutcome, VariantQuality
from localchat.units import size

HEAD = (
    *("MODEL", "SIZE", "KV", "PERPLEXITY", "BITS/BYTE", "KL", "KL P99", "TOP-1"),
    *("SAME TEXT", "JSON", "TOOLS", "NEEDLES", "RIGHT"),
)


def rows(record: QualityRecord) -> Iterator[tuple[str, ...]]:
    """A row of the table for each variant."""
    for one in record.measured:
        yield _row(one)


def _row(one: VariantQuality) -> tuple[str, ...]:
    found = one.perplexity
    far = one.divergence
    least = "" if far is None or far.complete else "≥"
    return (
        one.variant.name,
        size(one.file_bytes) if one.file_bytes else "-",
        one.kv_type or "-",
        f"{found.perplexity:.4g} ±{found.margin:.2g}" if found else "-",
        f"{found.bits_per_byte:.3f}" if found else "-",
        f"{least}{far.kl_mean:.2g}" if far else "-",
        f"{least}{far.kl_p99:.2g}" if far else "-",
        f"{far.same_top_share:.1%}" if far else "-",
        _same_text(one) if far or any(text.same is not None for text in one.greedy) else "-",
        *(_passed(tasks) for tasks in (one.json, one.tools, one.needles, one.questions)),
    )


def _same_text(one: VariantQuality) -> str:
    """Greedy texts that are the same to their end, of all."""
    if not one.greedy:
        return "-"
    return f"{sum(text.same is None for text in one.greedy)}/{len(one.greedy)}"


def _passed(tasks: Sequence[TaskOutcome]) -> str:
    if tasks:
        return f"{sum(task.passed for task in tasks)}/{len(tasks)}"
    return "-"


def sentences(record: QualityRecord) -> Iterator[str]:
    """Where greedy texts part, what was left out, and the verdicts last."""
    for one in record.measured:
        parted = [text for text in one.greedy if text.same is not None]
        if parted:
            first = min(parted, key=lambda text: text.same or 0)
            yield (
                f"{one.variant.name}: greedy texts part after {first.same} tokens at the earliest: "
                f"{first.prompt!r}"
            )
        for words in one.left_out:
            yield f"{one.variant.name}: left out: {words}"
    yield from record.verdicts


def needle_grid(record: QualityRecord) -> Iterator[str]:
    """Needles as a picture: a line for each length, a mark for each depth."""
    for one in record.measured:
        lengths = sorted({task.length for task in one.needles})
        if not any(task.passed for task in one.needles):
            continue
        yield f"{one.variant.name}: needles from the beginning of the text to its end"
        for length in lengths:
            marks = "".join(
                "█" if task.passed else "·" for task in one.needles if task.length == length
            )
            yield f"{length:>9,} {marks}"


def comparison_rows(one: QualityRecord, other: QualityRecord) -> Iterator[tuple[str, ...]]:
    """Variants of the same name in two records, one below the other."""
    names = {found.variant.name for found in other.measured}
    for number, record in ((1, one), (2, other)):
        shared = {found.variant.name for found in one.measured} & names
        for found in record.measured:
            if found.variant.name in shared:
                yield (str(record.id or number), *_row(found))


def differing_conditions(one: QualityRecord, other: QualityRecord) -> Iterator[str]:
    """Conditions of two records that make their figures hard to compare."""
    pairs = (
        ("text", one.spec.text_digest, other.spec.text_digest),
        ("window", one.spec.window_tokens, other.spec.window_tokens),
        ("windows", one.spec.most_windows, other.spec.most_windows),
        ("version", one.localchat, other.localchat),
        ("machine", one.machine.cpu, other.machine.cpu),
        ("questions", one.spec.questions, other.spec.questions),
    )
    for name, first, second in pairs:
        if first != second:
            yield f"Not the same {name}: {first} and {second}."
