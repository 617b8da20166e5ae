"""Charts of a benchmark as SVG: throughput, time to first token and time per token by clients."""

from collections.abc import Callable, Sequence
from html import escape
from math import log2
from typing import Final, NamedTuple

from localchat.measure.bench_record import BenchRecord
from localchat.measure.bench_report import heading
from localchat.measure.sweep import Point, series

_WIDTH = 420
_HEIGHT = 300
_LEFT = 64
_RIGHT = 16
_TOP = 40
_BOTTOM = 44
COLORS: Final = (
    "#2563eb",
    "#d97706",
    "#059669",
    "#dc2626",
    "#7c3aed",
    "#0891b2",
    "#be185d",
    "#4d7c0f",
)
STYLE: Final = (
    "text{font:12px system-ui,sans-serif;fill:#334155}.t{font-weight:600}.g{stroke:#e2e8f0}"
    ".a{stroke:#64748b}"
)


class _Curve(NamedTuple):
    """One line of a panel."""

    points: list[tuple[float, float]]
    color: str
    dashed: bool = False


class _ChartPanel(NamedTuple):
    title: str
    value: Callable[[Point], float | None]
    tail: Callable[[Point], float | None] = lambda point: None
    """A second, dashed line."""


_PANELS: Final = (
    _ChartPanel("Tokens a second", lambda point: point.figures.tokens_per_s),
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


def svg(record: BenchRecord) -> str:
    """A picture of every series of a record."""
    lines = list(series(record.points))
    legend = [(heading(record, line), COLORS[at % len(COLORS)]) for at, line in enumerate(lines)]
    height = 34 + _HEIGHT + 18 * len(legend) + 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH * 3}" height="{height}" '
        f'viewBox="0 0 {_WIDTH * 3} {height}"><style>{STYLE}</style>'
        f'<rect width="100%" height="100%" fill="#ffffff"/>'
        f'<text x="16" y="22" class="t">{escape(_title(record))}</text>'
    ]
    for at, panel in enumerate(_PANELS):
        parts.append(f'<g transform="translate({at * _WIDTH} 34)">{_panel(panel, lines)}</g>')
    for at, (words, color) in enumerate(legend):
        y = 34 + _HEIGHT + 14 + 18 * at
        parts.append(
            f'<rect x="{_LEFT}" y="{y - 9}" width="14" height="4" fill="{color}"/>'
            f'<text x="{_LEFT + 22}" y="{y - 3}">{escape(words)}</text>'
        )
    return "".join([*parts, "</svg>\n"])


def _title(record: BenchRecord) -> str:
    machine = " + ".join([record.machine.cpu, *record.machine.gpus])
    return (
        f"{', '.join(record.models)} · {machine} · localchat {record.localchat} · {record.at[:10]}"
    )


def _panel(panel: _ChartPanel, lines: Sequence[list[Point]]) -> str:
    curves = []
    for at, line in enumerate(lines):
        color = COLORS[at % len(COLORS)]
        curves.append(_Curve(_values(line, panel.value), color))
        curves.append(_Curve(_values(line, panel.tail), color, dashed=True))
    curves = [curve for curve in curves if curve.points]
    title = f'<text x="{_LEFT}" y="24" class="t">{escape(panel.title)}</text>'
    if not curves:
        return title
    clients = sorted({int(x) for curve in curves for x, _ in curve.points})
    ticks = _ticks(max(y for curve in curves for _, y in curve.points))
    across, down = _scales(clients, ticks[-1])
    grid = "".join(
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{down(tick):.1f}" y2="{down(tick):.1f}" class="g"/>'
        f'<text x="{_LEFT - 8}" y="{down(tick) + 4:.1f}" text-anchor="end">{tick:,.4g}</text>'
        for tick in ticks
    )
    axis = "".join(
        f'<text x="{across(count):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{count}</text>'
        for count in clients
    )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    axis += f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">clients</text>'
    return title + grid + axis + "".join(_curve(curve, across, down) for curve in curves)


def _values(line: list[Point], value: Callable[[Point], float | None]) -> list[tuple[float, float]]:
    found = ((point.place.clients, value(point)) for point in line)
    return [(clients, y) for clients, y in found if y is not None]


def _scales(
    clients: list[int], top: float
) -> tuple[Callable[[float], float], Callable[[float], float]]:
    """Places of a number of clients (logarithmic) and of a value (from 0)."""
    low = log2(clients[0])
    high = log2(clients[-1])
    width = _WIDTH - _LEFT - _RIGHT
    height = _HEIGHT - _TOP - _BOTTOM

    def across(count: float) -> float:
        return _LEFT + width * ((log2(count) - low) / (high - low) if high > low else 0.5)

    return across, lambda value: _HEIGHT - _BOTTOM - height * value / top


def _curve(curve: _Curve, across: Callable[[float], float], down: Callable[[float], float]) -> str:
    places = [(across(x), down(y)) for x, y in curve.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dashes = ' stroke-dasharray="5 4"' if curve.dashed else ""
    line = (
        f'<polyline points="{path}" fill="none" stroke="{curve.color}" stroke-width="2"{dashes}/>'
    )
    if curve.dashed:
        return line
    return line + "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{curve.color}"/>' for x, y in places
    )


def _ticks(most: float) -> list[float]:
    """Round numbers from 0 to the first above the largest value."""
    power = 10.0 ** (len(str(int(most))) - 1 if most >= 1 else -3)
    step = next(
        factor * power for factor in (0.1, 0.2, 0.25, 0.5, 1, 2, 5) if most / (factor * power) <= 5
    )
    return [step * at for at in range(int(most / step) + 2)]
