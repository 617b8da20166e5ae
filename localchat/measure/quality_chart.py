"""Charts of quality as SVG: divergence of each variant, and needles by length and depth."""

from html import escape
from math import log10
from typing import Final

from localchat.measure.bench_chart import COLORS, STYLE
from localchat.measure.quality_record import QualityRecord, VariantQuality

_WIDTH = 760
_LEFT = 220
_ROW = 26
_TOP = 64
_CELL: Final = 22
_LEAST_KL = 1e-5
_MOST_KL = 10.0
_PASSED = "#059669"
_FAILED = "#dc2626"


def svg(record: QualityRecord) -> str:
    """A picture of a record: bars of KL (logarithmic), below them a field of needles for each variant."""
    parts = [f'<text x="16" y="22" class="t">{escape(_title(record))}</text>']
    y = _TOP
    diverging = [one for one in record.measured if one.divergence is not None]
    if diverging:
        first = record.measured[0].variant.name
        words = f"Mean KL divergence from {first}, nats a token, logarithmic"
        parts.append(f'<text x="16" y="{y - 14}" class="t">{escape(words)}</text>')
    for at, one in enumerate(diverging):
        parts.append(_bar(one, COLORS[at % len(COLORS)], y))
        y += _ROW
    y += 34
    for one in record.measured:
        if one.needles:
            part, height = _field(one, y)
            parts.append(part)
            y += height
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y}" '
        f'viewBox="0 0 {_WIDTH} {y}"><style>{STYLE}</style>'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def _title(record: QualityRecord) -> str:
    names = ", ".join(one.variant.name for one in record.measured)
    return f"{names} · {record.spec.text} · localchat {record.localchat} · {record.at[:10]}"


def _bar(one: VariantQuality, color: str, y: int) -> str:
    assert one.divergence is not None
    kl = min(max(one.divergence.kl_mean, _LEAST_KL), _MOST_KL)
    share = log10(kl / _LEAST_KL) / log10(_MOST_KL / _LEAST_KL)
    width = max((_WIDTH - _LEFT - 90) * share, 2)
    return (
        f'<text x="{_LEFT - 10}" y="{y + 13}" text-anchor="end">{escape(one.variant.name)}</text>'
        f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="18" fill="{color}"/>'
        f'<text x="{_LEFT + width + 8:.1f}" y="{y + 13}">{one.divergence.kl_mean:.2g}</text>'
    )


def _field(one: VariantQuality, y: int) -> tuple[str, int]:
    """The needles of a variant from `y` on, and the height they take."""
    lengths = sorted({task.length for task in one.needles})
    words = f"{one.variant.name}: needles from the beginning of the text to its end"
    parts = [f'<text x="16" y="{y}" class="t">{escape(words)}</text>']
    for row, length in enumerate(lengths):
        top = y + 12 + row * _CELL
        parts.append(
            f'<text x="{_LEFT - 10}" y="{top + 15}" text-anchor="end">{length:,} tokens</text>'
        )
        for column, task in enumerate(task for task in one.needles if task.length == length):
            x = _LEFT + column * _CELL
            fill = _PASSED if task.passed else _FAILED
            parts.append(
                f'<rect x="{x}" y="{top}" width="{_CELL - 3}" height="{_CELL - 3}" fill="{fill}"/>'
            )
    return "".join(parts), 12 + len(lengths) * _CELL + 30
