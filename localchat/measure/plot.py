"""SVG charts: throughput and times of a benchmark; divergence and needles of a quality comparison."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from math import log2, log10
from typing import Final, NamedTuple

from localchat.measure.bench_report import heading
from localchat.measure.quality_report import needle_heading, needles_by_length
from localchat.measure.records import BenchRecord, QualityRecord, VariantQuality
from localchat.measure.sweep import Point, point_series

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


class _ChartPanel(NamedTuple):
    """A chart of one figure by clients."""

    title: str
    value: Callable[[Point], float | None]
    tail: Callable[[Point], float | None] = lambda point: None
    """Figure of a second, dashed line."""


_PANELS: Final = (
    _ChartPanel("Tokens per second", lambda point: point.figures.tokens_per_s),
    _ChartPanel(
        "Time to first token, ms: p50, p99 dashed",
        lambda point: point.figures.ttft_ms.p50,
        lambda point: point.figures.ttft_ms.p99,
    ),
    _ChartPanel(
        "Time per token, ms: p50, p99 dashed",
        lambda point: point.figures.tpot_ms.p50 if point.figures.tpot_ms else None,
        lambda point: point.figures.tpot_ms.p99 if point.figures.tpot_ms else None,
    ),
)
_PANEL_WIDTH: Final = 420
_PANEL_HEIGHT: Final = 300
_PLOT_LEFT: Final = 64
_PLOT_RIGHT: Final = _PANEL_WIDTH - 16
_PLOT_TOP: Final = 40
_PLOT_BOTTOM: Final = _PANEL_HEIGHT - 44
_MAX_TICKS: Final = 5


class _Curve(NamedTuple):
    """Line of a panel."""

    points: list[tuple[int, float]]
    """(clients, value)."""
    color: str
    dashed: bool


def bench_svg(record: BenchRecord) -> str:
    """Draw every series of a benchmark."""
    all_series = list(point_series(record.points))
    machine = " + ".join([record.machine.cpu, *record.machine.gpus])
    title = (
        f"{', '.join(record.models)} · {machine} · localchat {record.localchat} · {record.at[:10]}"
    )
    parts = [_text(16, 22, title, _BOLD)]
    for index, panel in enumerate(_PANELS):
        offset = f'transform="translate({index * _PANEL_WIDTH} {_TITLE_HEIGHT})"'
        parts.append(f"<g {offset}>{_draw_panel(panel, all_series)}</g>")
    legend_top = _TITLE_HEIGHT + _PANEL_HEIGHT + 14
    for index, series in enumerate(all_series):
        y = legend_top + _LEGEND_ROW * index
        parts.append(
            f'<rect x="{_PLOT_LEFT}" y="{y - 9}" width="14" height="4" fill="{_color(index)}"/>'
        )
        parts.append(_text(_PLOT_LEFT + 22, y - 3, heading(record, series)))
    return _svg(_PANEL_WIDTH * len(_PANELS), legend_top + _LEGEND_ROW * len(all_series), parts)


def _draw_panel(panel: _ChartPanel, all_series: Sequence[list[Point]]) -> str:
    parts = [_text(_PLOT_LEFT, 24, panel.title, _BOLD)]
    curves = list(_curves(panel, all_series))
    if not curves:
        return parts[0]
    clients = sorted({count for curve in curves for count, _ in curve.points})
    ticks = _ticks(max(value for curve in curves for _, value in curve.points))
    scale = _Scale(clients[0], clients[-1], ticks[-1])
    for tick in ticks:
        y = f"{scale.y(tick):.1f}"
        parts.append(f'<line x1="{_PLOT_LEFT}" x2="{_PLOT_RIGHT}" y1="{y}" y2="{y}" class="g"/>')
        parts.append(_text(_PLOT_LEFT - 8, round(scale.y(tick) + 4, 1), f"{tick:,.4g}", _RIGHT))
    for count in clients:
        parts.append(_text(round(scale.x(count), 1), _PLOT_BOTTOM + 18, str(count), _CENTER))
    middle = (_PLOT_LEFT + _PLOT_RIGHT) / 2
    parts.append(_text(middle, _PANEL_HEIGHT - 8, "clients", _CENTER))
    parts += [_draw_curve(curve, scale) for curve in curves]
    return "".join(parts)


def _curves(panel: _ChartPanel, all_series: Sequence[list[Point]]) -> Iterator[_Curve]:
    for index, series in enumerate(all_series):
        for figure, dashed in ((panel.value, False), (panel.tail, True)):
            values = [(point.key.clients, figure(point)) for point in series]
            points = [(clients, value) for clients, value in values if value is not None]
            if points:
                yield _Curve(points, _color(index), dashed)


class _Scale(NamedTuple):
    """Maps clients (logarithmic) and values (from 0) to a panel."""

    min_clients: int
    max_clients: int
    max_value: float

    def x(self, clients: int) -> float:
        low = log2(self.min_clients)
        high = log2(self.max_clients)
        share = (log2(clients) - low) / (high - low) if high > low else 0.5
        return _PLOT_LEFT + (_PLOT_RIGHT - _PLOT_LEFT) * share

    def y(self, value: float) -> float:
        return _PLOT_BOTTOM - (_PLOT_BOTTOM - _PLOT_TOP) * value / self.max_value


def _draw_curve(curve: _Curve, scale: _Scale) -> str:
    positions = [(scale.x(clients), scale.y(value)) for clients, value in curve.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in positions)
    line = f'<polyline points="{path}" fill="none" stroke="{curve.color}" stroke-width="2"'
    if curve.dashed:
        return f'{line} stroke-dasharray="5 4"/>'
    dots = (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{curve.color}"/>' for x, y in positions)
    return f"{line}/>{''.join(dots)}"


def _ticks(max_value: float) -> list[float]:
    """Return round numbers from 0 to the first above the largest value."""
    power = 10.0 ** (len(str(int(max_value))) - 1 if max_value >= 1 else -3)
    steps = (factor * power for factor in (0.1, 0.2, 0.25, 0.5, 1, 2, 5))
    step = next(step for step in steps if max_value / step <= _MAX_TICKS)
    return [step * index for index in range(int(max_value / step) + 2)]


_QUALITY_WIDTH: Final = 760
_BAR_LEFT: Final = 220
_BAR_ROW: Final = 26
_BAR_MAX_WIDTH: Final = _QUALITY_WIDTH - _BAR_LEFT - 90
_BARS_TOP: Final = 64
_CELL: Final = 22
_MIN_KL: Final = 1e-5
_MAX_KL: Final = 10.0
_PASSED: Final = "#059669"
_FAILED: Final = "#dc2626"


def quality_svg(record: QualityRecord) -> str:
    """Draw KL divergences as bars, and the needles of each variant as a grid."""
    names = ", ".join(measured.variant.name for measured in record.measured)
    title = f"{names} · {record.spec.text} · localchat {record.localchat} · {record.at[:10]}"
    parts = [_text(16, 22, title, _BOLD)]
    y = _BARS_TOP
    diverging = [measured for measured in record.measured if measured.divergence is not None]
    if diverging:
        base = record.measured[0].variant.name
        subtitle = f"Mean KL divergence from {base}, nats per token, logarithmic"
        parts.append(_text(16, y - 14, subtitle, _BOLD))
    for index, measured in enumerate(diverging):
        parts.append(_draw_bar(measured, _color(index), y))
        y += _BAR_ROW
    y += _BAR_ROW + 8
    for measured in record.measured:
        if measured.needles:
            parts.append(_draw_needles(measured, y))
            y += 42 + sum(1 for _ in needles_by_length(measured)) * _CELL
    return _svg(_QUALITY_WIDTH, y, parts)


def _draw_bar(measured: VariantQuality, color: str, y: int) -> str:
    assert measured.divergence is not None
    kl = measured.divergence.kl_mean
    share = log10(min(max(kl, _MIN_KL), _MAX_KL) / _MIN_KL) / log10(_MAX_KL / _MIN_KL)
    width = max(round(_BAR_MAX_WIDTH * share, 1), 2)
    return (
        _text(_BAR_LEFT - 10, y + 13, measured.variant.name, _RIGHT)
        + f'<rect x="{_BAR_LEFT}" y="{y}" width="{width}" height="18" fill="{color}"/>'
        + _text(_BAR_LEFT + width + 8, y + 13, f"{kl:.2g}")
    )


def _draw_needles(measured: VariantQuality, y: int) -> str:
    parts = [_text(16, y, needle_heading(measured), _BOLD)]
    for row, (length, tasks) in enumerate(needles_by_length(measured)):
        top = y + 12 + row * _CELL
        parts.append(_text(_BAR_LEFT - 10, top + 15, f"{length:,} tokens", _RIGHT))
        for column, task in enumerate(tasks):
            x = _BAR_LEFT + column * _CELL
            color = _PASSED if task.passed else _FAILED
            size = _CELL - 3
            parts.append(f'<rect x="{x}" y="{top}" width="{size}" height="{size}" fill="{color}"/>')
    return "".join(parts)
