"""Formats sizes, counts, rates, durations and shares for people.

The lowest layer: nothing of localchat is imported. JSON output and `/metrics` carry plain numbers instead.
"""

from typing import Final

_BYTE_UNITS: Final = ("kB", "MB", "GB", "TB")
_NO_DECIMALS_FROM: Final = 9.95
"""kB and MB from here on are whole: `640 MB`. GB and TB keep one decimal, which is 100 MB of memory."""


def size(count_bytes: float) -> str:
    """`4.7 GB`, `640 MB`, `12 B`: decimal units, as disks and downloads are sold."""
    value, unit, digits = _scaled(count_bytes)
    return f"{value:.{digits}f} {unit}"


def sizes(done_bytes: float, total_bytes: float) -> str:
    """A part and its whole in the unit of the whole: `2.1/4.7 GB`, `320/640 MB`."""
    total, unit, digits = _scaled(total_bytes)
    done = done_bytes * total / total_bytes if total_bytes else done_bytes
    return f"{done:.{digits}f}/{total:.{digits}f} {unit}"


def _scaled(count_bytes: float) -> tuple[float, str, int]:
    """The value in its unit, the unit, and how many decimals it is written with."""
    if abs(count_bytes) < 1000:
        return int(count_bytes), "B", 0
    power = 1
    # 999.5 would be written as 1000.
    while power < len(_BYTE_UNITS) and abs(count_bytes) >= 999.5 * 1000**power:
        power += 1
    value = count_bytes / 1000**power
    unit = _BYTE_UNITS[power - 1]
    return value, unit, 1 if power >= 3 or abs(value) < _NO_DECIMALS_FROM else 0


def gigabytes_flag(count_bytes: int) -> str:
    """`4.8`: the value of a flag in gigabytes that allows this many bytes, rounded up."""
    return f"{-(-count_bytes // 100_000_000) / 10:.1f}"


def counted(count: int, noun: str) -> str:
    """`1 message`, `1,234 messages`: for nouns whose plural ends in s."""
    return f"{count:,} {noun}" + "s" * (count != 1)


def tokens(count: int) -> str:
    """`32,768 tokens`, `1 token`."""
    return f"{count:,} token{'' if count == 1 else 's'}"


def rate(per_second: float) -> str:
    """`62.0 tok/s`; from a thousand on `1,200 tok/s`."""
    if per_second >= 999.5:
        return f"{per_second:,.0f} tok/s"
    return f"{per_second:.1f} tok/s"


def duration(seconds: float) -> str:
    """`42 s`, `6 min 05 s`, `2 h 10 min`."""
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    if whole < 100 * 60:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def percent(part: float, whole: float) -> str:
    """`1%`; `<1%` for what is more than nothing; `0%` of nothing."""
    if part > 0 and (whole <= 0 or part / whole < 0.005):
        return "<1%"
    return f"{100 * part / whole:.0f}%" if whole else "0%"


def used_of(used: int, total: int) -> str:
    """`412/32,768 (1%)`; the first number alone where the total is unknown (0)."""
    if total:
        return f"{used:,}/{total:,} ({percent(used, total)})"
    return f"{used:,}"


def decimal(value: float | None, digits: int) -> str:
    """The value with this many decimals; a dash where nothing was measured."""
    return "-" if value is None else f"{value:.{digits}f}"


def brief_seconds(seconds: float) -> str:
    """`0.05 s`, `0.4 s`, `12 s`."""
    digits = 2 if seconds < 0.095 else 1 if seconds < 9.95 else 0
    return f"{seconds:.{digits}f} s"
