"""Sizes, counts and verdicts in words. Nothing here prints."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localchat.fit.plan import MemoryPlan

_UNITS = ("kB", "MB", "GB", "TB")


def size(count_bytes: int) -> str:
    """`4.7 GB`, `640 MB`, `12 bytes`: decimal units, as disks and downloads are sold."""
    if abs(count_bytes) < 1000:
        return f"{count_bytes} bytes"
    power = 1
    # 999.5 would be written 1000.
    while power < len(_UNITS) and abs(count_bytes) >= 999.5 * 1000**power:
        power += 1
    value, unit = count_bytes / 1000**power, _UNITS[power - 1]
    return f"{value:.1f} {unit}" if abs(value) < 9.95 or power >= 3 else f"{value:.0f} {unit}"


def flag_gigabytes(count_bytes: int) -> str:
    """`4.8`: as a flag that allows so many bytes takes it, rounded up."""
    return f"{-(-count_bytes // 100_000_000) / 10:.1f}"


def tokens(count: int) -> str:
    """`32,768 tokens`, `1 token`."""
    return f"{count:,} token{'' if count == 1 else 's'}"


def rate(per_second: float) -> str:
    """`62.0 tok/s`; from a thousand on `1,200 tok/s`."""
    return f"{per_second:,.0f} tok/s" if per_second >= 999.5 else f"{per_second:.1f} tok/s"


def duration(seconds: float) -> str:
    """`42 s`, `6 min 05 s`, `2 h 10 min`."""
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    if whole < 100 * 60:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def percent(part: float, whole: float) -> str:
    """`1 %`; `<1 %` for what is more than nothing; `0 %` of nothing."""
    if part > 0 and (whole <= 0 or part / whole < 0.005):
        return "<1 %"
    return f"{100 * part / whole:.0f} %" if whole else "0 %"


_SIGNS = (
    ("█", "weights"),
    ("▓", "KV"),
    ("▒", "compute"),
    ("░", "overhead"),
    ("╱", "other processes"),
)
_KEPT, _FREE = "-", "·"


def bar(
    plan: "MemoryPlan", memory_bytes: int, others_bytes: int, width: int = 60
) -> tuple[str, ...]:
    """The memory that bounds a plan as a bar of `width` cells, and what its signs mean. Where the plan does
    not fit, `|` stands where the memory ends. memory_bytes: all of it; others_bytes: taken already."""
    parts = (
        *(plan.weights_bytes, plan.kv_bytes, plan.compute_bytes, plan.overhead_bytes),
        others_bytes,
    )
    kept = max(memory_bytes - others_bytes - plan.free_bytes, 0)
    free = max(plan.free_bytes - plan.total_bytes, 0)
    signs = (*(sign for sign, _ in _SIGNS), _KEPT, _FREE)
    drawn = _cells(tuple(zip(signs, (*parts, kept, free), strict=True)), width)
    if plan.total_bytes > plan.free_bytes:
        whole = sum((*parts, kept))
        end = min(width * memory_bytes // max(whole, 1), width - 1)
        drawn = f"{drawn[:end]}|{drawn[end:]}"
    told = [f"{sign} {name} {size(part)}" for (sign, name), part in zip(_SIGNS, parts, strict=True)]
    told += [f"{_KEPT} kept free {size(kept)}", f"{_FREE} left over {size(free)}"]
    return (f"[{drawn}] {size(memory_bytes)}", ", ".join(told[:4]), ", ".join(told[4:]))


def _cells(parts: tuple[tuple[str, int], ...], width: int) -> str:
    """`width` cells shared in proportion, by rounding the running sum, so that nothing is lost."""
    whole = max(sum(count for _, count in parts), 1)
    done, text = 0, ""
    for sign, count in parts:
        done += count
        text += sign * (round(width * done / whole) - len(text))
    return text


def parts(plan: "MemoryPlan") -> str:
    """What a load that lacks something would take, one sentence."""
    return f"It would take {size(plan.total_bytes)}: {_shares(plan)}."


def _shares(plan: "MemoryPlan") -> str:
    return (
        f"weights {size(plan.weights_bytes)} · KV {size(plan.kv_bytes)} ({plan.kv_type}) · "
        f"compute {size(plan.compute_bytes)} · overhead {size(plan.overhead_bytes)}"
    )


def verdict(plan: "MemoryPlan") -> tuple[str, ...]:
    """The plan in a few lines: whether it fits, of what it consists, what would help."""
    word = "Fits" if plan.fits else "Does not fit"
    if plan.missing:
        return (f"{word}: {plan.missing}", "", *plan.notes, *plan.advice)
    lines = [
        f"{word}: {size(plan.total_bytes)} of {size(plan.free_bytes)} free, "
        f"{tokens(plan.context_tokens)} of context.",
        _shares(plan),
    ]
    if plan.gpu_layers:
        where = (
            f"{size(plan.gpu_bytes)} of {size(plan.gpu_free_bytes)} free"
            if plan.gpu_bytes
            else "unified memory"
        )
        lines.append(f"GPU: {plan.gpu_layers} of {plan.layers} layers, {where}.")
    if plan.fits and plan.max_context_tokens > plan.context_tokens:
        lines.append(f"Up to {tokens(plan.max_context_tokens)} of context would fit.")
    return (*lines, *plan.notes, *plan.advice)
