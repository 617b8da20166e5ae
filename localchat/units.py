"""Formats sizes, counts, rates, durations and shares for people.

This is the lowest layer and imports nothing of localchat. JSON output and `/metrics` contain plain numbers
instead.
"""

import time
from typing import Final

_BYTE_UNITS: Final = ("kB", "MB", "GB", "TB")
_NO_DECIMALS_FROM: Final = 9.95
"""From this value on, kB and MB have no decimals: `640 MB`. GB and TB keep one, which is 100 MB of memory."""


def size(count_bytes: float) -> str:
    """Format a size in decimal units: `4.7 GB`, `640 MB`, `12 B`."""
    value, unit, digits = _scaled(count_bytes)
    return f"{value:.{digits}f} {unit}"


def sizes(done_bytes: float, total_bytes: float) -> str:
    """Format a part and its total in the unit of the total: `2.1/4.7 GB`, `320/640 MB`."""
    total, unit, digits = _scaled(total_bytes)
    done = done_bytes * total / total_bytes if total_bytes else done_bytes
    return f"{done:.{digits}f}/{total:.{digits}f} {unit}"


def _scaled(count_bytes: float) -> tuple[float, str, int]:
    """Return the value in its unit, the unit, and the number of decimals."""
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
    """Return the gigabytes of a flag that allows this many bytes, rounded up: `4.8`."""
    return f"{-(-count_bytes // 100_000_000) / 10:.1f}"


def counted(count: int, noun: str) -> str:
    """Format a count with a noun whose plural ends in s: `1 message`, `1,234 messages`."""
    return f"{count:,} {noun}" + "s" * (count != 1)


def tokens(count: int) -> str:
    """Format a token count: `32,768 tokens`, `1 token`."""
    return counted(count, "token")


def rate(per_second: float) -> str:
    """Format a rate: `62.0 tok/s`, `1,200 tok/s`."""
    if per_second >= 999.5:
        return f"{per_second:,.0f} tok/s"
    return f"{per_second:.1f} tok/s"


def duration(seconds: float) -> str:
    """Format a duration: `42 s`, `6 min 05 s`, `2 h 10 min`."""
    total_s = round(seconds)
    if total_s < 100:
        return f"{total_s} s"
    if total_s < 100 * 60:
        return f"{total_s // 60} min {total_s % 60:02} s"
    return f"{total_s // 3600} h {total_s % 3600 // 60:02} min"


def moment(unix_s: float) -> str:
    """Format a Unix time as local time: `2026-11-23 10:00`."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))


def percent(part: float, total: float) -> str:
    """Format a share: `1%`, `<1%` for anything above nothing, `0%` of nothing."""
    if part > 0 and (total <= 0 or part / total < 0.005):
        return "<1%"
    return f"{100 * part / total:.0f}%" if total else "0%"


def used_of(used: int, total: int) -> str:
    """Format a used amount: `412/32,768 (1%)`, or only the first number if the total is unknown (0)."""
    if total:
        return f"{used:,}/{total:,} ({percent(used, total)})"
    return f"{used:,}"


def decimal(value: float | None, digits: int) -> str:
    """Format a value with this many decimals, or a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def brief_seconds(seconds: float) -> str:
    """Format a short duration: `0.05 s`, `0.4 s`, `12 s`."""
    if seconds < 0.095:
        return f"{seconds:.2f} s"
    return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
