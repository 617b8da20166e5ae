"""SVG charts: the loss of a quality comparison by size and speed."""

from collections.abc import Iterable, Sequence
from html import escape
from math import ceil, floor, log10
from typing import Final

from localchat.measure.records import QualityRecord, VariantQuality

_COLORS: Final = (
    *("#2563eb", "#d97706", "#059669", "#dc2626"),
    *("#7c3aed", "#0891b2", "#be185d", "#4d7c0f"),
)
_STYLE: Final = (
    "text{font:12px system-ui,sans-serif;fill:#334155}.t{font-weight:600}.g{stroke:#e2e8f0}"
    ".a{stroke:#64748b}"
)
_TITLE_HEIGHT: Final = 34
_LEGEND_ROW: Final = 18


def _svg(width: int, height: int, parts: Iterable[str]) -> str:
    """Return a picture of these parts on a white ground."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}"><style>{_STYLE}</style>'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"{attributes}>{escape(text)}</text>'


_BOLD: Final = ' class="t"'
_RIGHT: Final = ' text-anchor="end"'
_CENTER: Final = ' text-anchor="middle"'


def _color(index: int) -> str:
    return _COLORS[index % len(_COLORS)]


_PANEL_WIDTH: Final = 420
_PANEL_HEIGHT: Final = 300
_PLOT_LEFT: Final = 64
_PLOT_RIGHT: Final = _PANEL_WIDTH - 16
_PLOT_TOP: Final = 40
_PLOT_BOTTOM: Final = _PANEL_HEIGHT - 44
_MAX_TICKS: Final = 5


def _ticks(max_value: float) -> list[float]:
    """Return round numbers from 0 to the first above the largest value."""
    power = 10.0 ** floor(log10(max_value)) if max_value > 0 else 1e-3
    steps = (factor * power for factor in (0.1, 0.2, 0.25, 0.5, 1, 2, 5))
    step = next(step for step in steps if max_value / step <= _MAX_TICKS)
    return [step * index for index in range(int(max_value / step) + 2)]


_MIN_KL: Final = 1e-4
"""Lower end of the charts. The first variant, whose divergence is 0, is drawn there too."""
_GB: Final = 1e9


def quality_svg(record: QualityRecord) -> str:
    """Draw the losses by size and by speed."""
    title = f"Loss over the {record.spec.text}, lower is better"
    parts = [_text(16, 22, f"{title} · localchat {record.localchat} · {record.at[:10]}", _BOLD)]
    y = _TITLE_HEIGHT
    width = _PANEL_WIDTH * 2
    if any(measured.divergence is not None for measured in record.measured):
        sizes = [measured.file_bytes / _GB or None for measured in record.measured]
        speeds = [measured.tokens_per_s for measured in record.measured]
        panels = [("size, GB", sizes), ("tokens per second", speeds)]
        for index, (axis, values) in enumerate(panels):
            offset = f'transform="translate({index * _PANEL_WIDTH} {y})"'
            parts.append(f"<g {offset}>{_draw_losses(record.measured, axis, values)}</g>")
        y += _PANEL_HEIGHT + 14
        for index, measured in enumerate(record.measured):
            row = y + _LEGEND_ROW * index
            dot = f'<circle cx="{_PLOT_LEFT}" cy="{row - 4}" r="5" fill="{_color(index)}"/>'
            parts += [dot, _text(_PLOT_LEFT + 14, row, _legend(measured))]
        y += _LEGEND_ROW * len(record.measured)
    return _svg(width, y, parts)


def _legend(measured: VariantQuality) -> str:
    """Return the name of a variant with its figures."""
    words = [measured.variant.name]
    if measured.divergence is None:
        words.append("the first, to which the others are compared")
    else:
        words.append(f"mean KLD {measured.divergence.kl_mean:.2g}")
        words.append(f"same top p {measured.divergence.same_top_share:.1%}")
    if measured.tokens_per_s is not None:
        words.append(f"{measured.tokens_per_s:.3g} tok/s")
    return " · ".join(words)


def _draw_losses(
    variants: Sequence[VariantQuality], axis: str, values: Sequence[float | None]
) -> str:
    """Draw the mean divergence, logarithmic, against a value of each variant. Dots have the legend's colors."""
    measured = [value for value in values if value is not None]
    parts = [_text(_PLOT_LEFT, 24, f"Mean KLD by {axis}", _BOLD)]
    if not measured:
        return "".join((*parts, _text(_PLOT_LEFT, 60, "not measured: --speed")))
    ticks = _ticks(max(measured))
    losses = [variant.divergence.kl_mean for variant in variants if variant.divergence]
    low = floor(log10(max(min(losses), _MIN_KL)))
    high = max(ceil(log10(max(*losses, _MIN_KL))), low + 1)

    def x(value: float) -> float:
        return _PLOT_LEFT + (_PLOT_RIGHT - _PLOT_LEFT) * value / ticks[-1]

    def y(loss: float) -> float:
        share = (log10(max(loss, 10.0**low)) - low) / (high - low)
        return _PLOT_BOTTOM - (_PLOT_BOTTOM - _PLOT_TOP) * share

    for power in range(low, high + 1):
        height = f"{y(10.0**power):.1f}"
        parts.append(
            f'<line x1="{_PLOT_LEFT}" x2="{_PLOT_RIGHT}" y1="{height}" y2="{height}" class="g"/>'
        )
        parts.append(_text(_PLOT_LEFT - 8, y(10.0**power) + 4, f"{10.0**power:g}", _RIGHT))
    for tick in ticks:
        parts.append(_text(round(x(tick), 1), _PLOT_BOTTOM + 18, f"{tick:,.4g}", _CENTER))
    middle = (_PLOT_LEFT + _PLOT_RIGHT) / 2
    parts.append(_text(middle, _PANEL_HEIGHT - 8, axis, _CENTER))
    for index, (variant, value) in enumerate(zip(variants, values, strict=True)):
        if value is None:
            continue
        loss = variant.divergence.kl_mean if variant.divergence is not None else 0.0
        label = variant.quantization or variant.variant.name
        if len({other.quantization for other in variants}) == 1:
            label = variant.variant.name
        parts.append(
            f'<circle cx="{x(value):.1f}" cy="{y(loss):.1f}" r="5" fill="{_color(index)}"/>'
        )
        # A label at the right edge goes to the left of its dot.
        side = _RIGHT if x(value) > middle else ""
        shift = -9 if side else 9
        parts.append(_text(round(x(value) + shift, 1), round(y(loss) - 7, 1), label, side))
    return "".join(parts)
