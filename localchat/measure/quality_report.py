"""Quality results as text and tables.

Figures of a text have the names that llama-perplexity gives them.
"""

from collections.abc import Iterator, Sequence

from localchat.fit.contention import BUSY_SHARE
from localchat.measure.records import QualityRecord, TaskOutcome, VariantQuality
from localchat.units import size

HEAD = (
    *(
        "MODEL",
        "SIZE",
        "KV",
        "TOK/S",
        "PPL",
        "BITS/BYTE",
        "MEAN KLD",
        "99% KLD",
        "RMS ΔP",
        "SAME TOP P",
    ),
    *("JSON", "TOOLS", "NEEDLES", "RIGHT"),
)


def row(measured: VariantQuality) -> tuple[str, ...]:
    """Return the row of a variant. A figure that was not measured is a dash."""
    perplexity = bits_per_byte = kl_mean = kl_p99 = delta_p = top_1 = speed = "-"
    if measured.tokens_per_s is not None:
        speed = f"{measured.tokens_per_s:.3g}"
    if measured.perplexity is not None:
        figures = measured.perplexity
        perplexity = f"{figures.perplexity:.4g} ±{figures.margin:.2g}"
        bits_per_byte = f"{figures.bits_per_byte:.3f}"
    if measured.divergence is not None:
        divergence = measured.divergence
        bound = "" if divergence.complete else "≥"
        kl_mean = f"{bound}{divergence.kl_mean:.2g}"
        kl_p99 = f"{bound}{divergence.kl_p99:.2g}"
        top_1 = f"{divergence.same_top_share:.1%}"
        if divergence.delta_p_rms is not None:
            delta_p = f"{divergence.delta_p_rms:.1%}"
    return (
        measured.variant.name,
        size(measured.file_bytes) if measured.file_bytes else "-",
        measured.kv_type or "-",
        *(speed, perplexity, bits_per_byte, kl_mean, kl_p99, delta_p, top_1),
        _passed(measured.json),
        _passed(measured.tools),
        _passed(measured.needles),
        _passed(measured.questions),
    )


def _passed(tasks: Sequence[TaskOutcome]) -> str:
    if not tasks:
        return "-"
    return f"{sum(task.passed for task in tasks)}/{len(tasks)}"


def sentences(record: QualityRecord) -> Iterator[str]:
    """Report skipped tests, and the verdicts last."""
    for measured in record.measured:
        name = measured.variant.name
        for test in measured.left_out:
            yield f"{name}: skipped: {test}"
    has_speed = any(measured.tokens_per_s is not None for measured in record.measured)
    if has_speed and record.others_share >= BUSY_SHARE:
        yield f"Other programs used {record.others_share:.0%} of the CPU, so the models are faster than shown."
    yield from record.verdicts
