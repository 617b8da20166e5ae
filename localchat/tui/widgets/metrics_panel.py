"""The metrics panel: rows built from the engine's status, and the widget that draws them.

The panel is one widget, because a widget per row takes twice as long to draw.
"""

import time
from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import ClassVar, Final, NamedTuple

from rich.segment import Segment
from textual import events
from textual.binding import BindingType
from textual.reactive import reactive
from textual.strip import Strip

from localchat import metrics, units
from localchat.engine.events import EngineStats, MetricsSnapshot, RunningRequest
from localchat.engine.interface import MemoryParts
from localchat.engine.stats_line import read_back
from localchat.metrics import METRICS
from localchat.sanitize import sanitize_line
from localchat.session.engine_status import EngineStatus
from localchat.session.progress import time_left
from localchat.tui.keymap import bindings
from localchat.tui.textual_internals.flat_widget import StyledWidget
from localchat.tui.transcript.markdown.rows import Look, Piece
from localchat.tui.widgets.charts import bar, histogram, shares, sparkline
from localchat.units import size, used_of


class MetricRow(NamedTuple):
    """A row of the panel."""

    pieces: tuple[Piece, ...]
    metric: str = ""
    """Name in the table of metrics, which explains it. Empty for blank rows and headings."""

    @property
    def is_heading(self) -> bool:
        """Whether the row names the section below it."""
        return bool(self.pieces) and not self.metric

    @property
    def is_blank(self) -> bool:
        """Whether the row separates two sections."""
        return not self.pieces


def _piece(text: str, style: str = "plain") -> Piece:
    """Return text in a component style of the panel, named without its prefix."""
    return Piece(text, Look(style))


_BLANK: Final = MetricRow(())
_MEMORY: Final = (
    ("weights", "weights_bytes", "weights"),
    ("KV", "kv_bytes", "kv"),
    ("compute", "compute_bytes", "compute"),
    ("overhead", "overhead_bytes", "overhead"),
)
"""Label, name and style of each part of the memory."""
_MIN_PLAN_ERROR_BYTES: Final = 1_000_000
_NO_METRICS: Final = MetricsSnapshot("queued")


def panel_rows(status: EngineStatus, width: int) -> tuple[MetricRow, ...]:
    """Build all rows of a panel that is `width` cells wide inside."""
    rows: list[MetricRow] = []
    for section in (_memory, _kv_cache, _speed, _speculation, _prefix_cache, _engine):
        section_rows = list(section(status, width))
        if rows and section_rows:
            rows.append(_BLANK)
        rows += section_rows
    return tuple(rows)


def _heading(title: str, right: str, width: int) -> MetricRow:
    space = max(1, width - len(title) - len(right))
    return MetricRow((_piece(title, "heading"), _piece(" " * space), _piece(right, "quiet")))


def _line(
    metric: str, value: str, width: int, *, style: str = "plain", label: str = ""
) -> MetricRow:
    """Return a row with the label of a metric and its value, aligned right."""
    label = label or METRICS[metric].label
    space = max(1, width - len(label) - len(value))
    pieces = (_piece(label, "quiet"), _piece(" " * space), _piece(value, style))
    return MetricRow(pieces, metric)


def _bar(metric: str, part: float, total: float, width: int) -> MetricRow:
    return MetricRow((_piece(bar(part, total, width), "bar"),), metric)


def _wrapped(metric: str, text: str, width: int) -> Iterator[MetricRow]:
    for line in wrap(sanitize_line(text), width):
        yield MetricRow((_piece(line, "quiet"),), metric)


def _token_count(count: str) -> str:
    return f"{count} tok"


def _memory(status: EngineStatus, width: int) -> Iterator[MetricRow]:
    info = status.info
    if info is None:
        yield _heading("Memory", "after the load", width)
        return
    if info.backend == "remote":
        return
    shown = info.actual or info.predicted
    if shown is None:
        total = info.actual_bytes or info.predicted_bytes
    else:
        # The sum of the rows below. The measured total may omit pages that are mapped but never read.
        total = sum(max(0, getattr(shown, name)) for _, name, _ in _MEMORY)
    share = "-"
    if total:
        share = f"{size(total)} of {size(info.free_bytes)}"
    yield _heading("Memory", share, width)
    if info.actual is not None:
        yield _stacked_bar(info.actual, info.free_bytes, "actual_bytes", width)
    elif info.predicted is not None:
        yield _stacked_bar(info.predicted, info.free_bytes, "predicted_bytes", width)
    if shown is None:
        return
    for label, name, style in _MEMORY:
        part_bytes = getattr(shown, name)
        planned_bytes = -1
        if info.predicted is not None:
            planned_bytes = getattr(info.predicted, name)
        plan_note = ""
        if info.actual is not None and _differs_from_plan(part_bytes, planned_bytes):
            plan_note = f"  planned {size(planned_bytes)}"
        value = "-" if part_bytes < 0 else size(part_bytes)
        space = max(1, width - len("█ ") - len(label) - len(value) - len(plan_note))
        yield MetricRow(
            (
                _piece("█ ", style),
                _piece(label, "quiet"),
                _piece(" " * space),
                _piece(value),
                _piece(plan_note, "quiet"),
            ),
            name,
        )
    if info.free_bytes:
        left = max(0, info.free_bytes - total)
        yield _line("free_bytes", size(left), width, label="· free")


def _differs_from_plan(actual_bytes: int, planned_bytes: int) -> bool:
    """Return whether memory differs enough from its plan to show both.

    Negative values are unknown.
    """
    if actual_bytes < 0 or planned_bytes < 0:
        return False
    return abs(actual_bytes - planned_bytes) > max(_MIN_PLAN_ERROR_BYTES, planned_bytes // 20)


def _stacked_bar(parts: MemoryParts, free_bytes: int, metric: str, width: int) -> MetricRow:
    """Return one bar of weights, KV cache, buffers and free memory, with its label."""
    counts = [max(0, getattr(parts, name)) for _, name, _ in _MEMORY]
    counts.append(max(0, free_bytes - sum(counts)))
    *part_cells, free_cells = shares(counts, width - len("planned "))
    pieces = [
        _piece("█" * cells, style)
        for cells, (_, _, style) in zip(part_cells, _MEMORY, strict=True)
        if cells
    ]
    pieces.append(_piece("·" * free_cells, "quiet"))
    pieces.append(_piece(f" {METRICS[metric].label:>7}", "quiet"))
    return MetricRow(tuple(pieces), metric)


def _latest_snapshot(status: EngineStatus) -> MetricsSnapshot:
    """Return the latest snapshot of the engine. Zeros if none was reported."""
    if status.stats is not None and (status.metrics is None or not status.busy):
        return status.stats.now
    return status.metrics or _NO_METRICS


def _kv_cache(status: EngineStatus, width: int) -> Iterator[MetricRow]:
    used, total = status.kv
    if not total:
        return
    yield _heading("KV cache", used_of(used, total), width)
    snapshot = _latest_snapshot(status)
    if status.stats is not None and not status.busy:
        # The last request has freed its tokens since it reported them.
        used = status.stats.now.kv_used_tokens
    shared = snapshot.kv_shared_tokens
    cached = snapshot.kv_cached_tokens
    swapped = snapshot.kv_swapped_tokens
    used_cells, cached_cells, free_cells = shares(
        [used, cached, max(0, total - used - cached)], width
    )
    cells = (
        _piece("█" * used_cells, "kv"),
        _piece("▒" * cached_cells, "kv"),
        _piece("·" * free_cells, "quiet"),
    )
    yield MetricRow(cells, "kv_total_tokens")
    yield _line("kv_used_tokens", _token_count(f"{used:,}"), width)
    if shared:
        value = _token_count(f"{shared:,}")
        yield _line("kv_shared_tokens", value, width, label="  of it shared")
    yield _line("kv_cached_tokens", _token_count(f"{cached:,}"), width)
    if swapped:
        yield _line("kv_swapped_tokens", _token_count(f"{swapped:,}"), width)
    if status.stats is not None and status.stats.evictions:
        yield _line("evictions", f"{status.stats.evictions:,}", width)


def _speed(status: EngineStatus, width: int) -> Iterator[MetricRow]:
    decode_rate = status.decode_tokens_per_s
    prefill_rate = status.prefill_tokens_per_s
    times = status.stats.tpot_ms if status.stats else ()
    if status.ttft_s is None and decode_rate is None and prefill_rate is None and not times:
        return
    yield _heading("Speed", status.state, width)
    if prefill_rate is not None and status.prefill is not None:
        # Only the prefill under way: the other metrics belong to the previous answer.
        value = units.rate(prefill_rate)
        yield _line("prefill_tokens_per_s", value, width, style="metric")
        yield _bar("prefill_done_tokens", status.prefill.done, status.prefill.total, width)
        left = time_left(status, time.monotonic()).removesuffix(" left")
        yield _line("prefill_done_tokens", left or "-", width, label="  time left")
        return
    yield _line("ttft_s", f"{units.decimal(status.ttft_s, 2)} s", width)
    value = "-"
    if decode_rate is not None:
        value = units.rate(decode_rate)
    yield _line("decode_tokens_per_s", value, width, style="metric")
    if spark := sparkline(status.rates, width):
        yield MetricRow((_piece(spark, "spark"),), "decode_tokens_per_s")
    if status.done is not None and status.done.timings.prefill_tokens_per_s is not None:
        value = units.rate(status.done.timings.prefill_tokens_per_s)
        yield _line("prefill_tokens_per_s", value, width)
    for name, milliseconds in _percentiles(status, times):
        yield _line(name, f"{units.decimal(milliseconds, 1)} ms", width)
    histogram_text, low, high = histogram(times, width)
    if histogram_text:
        yield MetricRow((_piece(histogram_text, "spark"),), "tpot_ms")
        left = f"{low:.1f}"
        right = f"{high:.1f} ms"
        space = " " * max(1, width - len(left) - len(right))
        yield MetricRow((_piece(left + space + right, "quiet"),), "tpot_ms")


def _percentiles(
    status: EngineStatus, times: Sequence[float]
) -> Iterator[tuple[str, float | None]]:
    """Yield the percentiles of TPOT in ms.

    They cover the last request if it is done, otherwise the latest tokens.
    """
    for name, share in (("tpot_ms_p50", 0.5), ("tpot_ms_p95", 0.95), ("tpot_ms_p99", 0.99)):
        if status.done is not None:
            yield name, getattr(status.done.timings, name)
        else:
            yield name, metrics.percentile(times, share)


def _speculation(status: EngineStatus, width: int) -> Iterator[MetricRow]:
    accepted, drafted = status.drafts
    why_off = ""
    if status.done is not None:
        why_off = status.done.speculation.off
    elif status.metrics is not None:
        why_off = status.metrics.speculation_off
    if not drafted and not why_off:
        return
    yield _heading("Speculation", "on" if drafted else "off", width)
    if drafted:
        yield _line("acceptance", used_of(accepted, drafted), width)
        yield _bar("acceptance", accepted, drafted, width)
    stats = status.stats
    if stats is not None and stats.draft_steps:
        length = stats.accepted / stats.draft_steps
        yield _line("accepted_length", _token_count(f"{length:.2f}"), width)
    if status.done is not None and status.done.speculation.speedup is not None:
        yield _line("speedup", f"× {status.done.speculation.speedup:.2f}", width)
    if why_off:
        yield from _wrapped("speculation_off", why_off, width)


def _prefix_cache(status: EngineStatus, width: int) -> Iterator[MetricRow]:
    prefill = status.prefill
    if prefill is None:
        return
    share = _token_count(f"{prefill.cached:,}/{prefill.total:,}")
    yield _heading("Prefix cache", share, width)
    yield _bar("cached_tokens", prefill.cached, prefill.total, width)
    if prefill.read_back:
        text = read_back(prefill.read_back, prefill.total, prefill.read_s)
        yield from _wrapped("cached_tokens", text, width)
    if prefill.why_missed:
        yield from _wrapped("why_missed", f"missed: {prefill.why_missed}", width)


def _engine(status: EngineStatus, width: int) -> Iterator[MetricRow]:
    info = status.info
    if info is None:
        return
    yield _heading("Engine", sanitize_line(info.backend), width)
    yield _line("fingerprint", sanitize_line(info.model)[: width - len("model   ")], width)
    for adapter in info.adapters:
        yield from _wrapped("fingerprint", f"LoRA {sanitize_line(adapter)}", width)
    if info.context_tokens:
        yield _line("context_tokens", _token_count(f"{info.context_tokens:,}"), width)
    if info.backend == "remote":
        # A remote server reports nothing else.
        return
    yield _line("threads", f"{info.threads}", width)
    yield _line("gpu_layers", f"{info.gpu_layers}/{info.layers}", width)
    for number, part in enumerate(info.gpu_parts):
        yield _line("gpu_layers", part.text, width, label=f"  GPU {number}")
    if status.stats is not None:
        yield from _requests(status, status.stats, width)


def _requests(status: EngineStatus, stats: EngineStats, width: int) -> Iterator[MetricRow]:
    yield _line("running", f"{stats.now.running}", width)
    yield _line("waiting", f"{stats.now.waiting}", width)
    for request in stats.requests:
        user = sanitize_line(request.user) or "this chat"
        count = _token_count(_request_tokens(request, status))
        value = f"{request.phase} {count}, {units.duration(request.age_s)}"
        label = f"  {user}"[: width - len(value) - 1]
        yield _line("running", value, width, label=label)


def _request_tokens(request: RunningRequest, status: EngineStatus) -> str:
    """Return the generated tokens of a request, or its prompt tokens during the prefill."""
    if request.phase == "decode":
        return f"{request.completion_tokens:,}"
    if status.prefill is not None and not request.user:
        return f"{status.prefill.done:,}/{request.prompt_tokens:,}"
    return f"{request.prompt_tokens:,}"


def column_ranges(rows: Sequence[MetricRow], top: int, height: int, columns: int) -> list[range]:
    """Return the indexes of the rows that each column shows, from row `top` on.

    A heading stays with the first row of its section, and a value with its bar.
    """
    ranges: list[range] = []
    start = top
    for _ in range(columns):
        # A blank row separates two sections. At the top of a column it would only waste a line.
        if ranges and start < len(rows) and rows[start].is_blank:
            start += 1
        end = min(len(rows), start + height)
        while start + 1 < end < len(rows) and _belongs_to_next(rows, end - 1):
            end -= 1
        ranges.append(range(start, end))
        start = end
    return ranges


def _belongs_to_next(rows: Sequence[MetricRow], index: int) -> bool:
    row = rows[index]
    return row.is_heading or (bool(row.metric) and row.metric == rows[index + 1].metric)


_ABOUT_ROWS: Final = 4
_MIN_TWO_COLUMNS: Final = 76
"""Width from which the rows have two columns. Half of it cuts no row."""
_STYLES: Final = (
    *("plain", "quiet", "heading", "metric", "spark", "bar", "rule", "about", "marked"),
    *("weights", "kv", "compute", "overhead"),
)


class MetricsPanel(StyledWidget, can_focus=True):
    """Rows of metrics, and below them one sentence about the marked metric."""

    BINDINGS: ClassVar[list[BindingType]] = [*bindings("panel")]
    SCOPED_CSS = False
    DEFAULT_CSS = """
    MetricsPanel {
        dock: right;
        layer: above;
        width: 100%;
        height: 100%;
        background: $surface;
    }

    ChatScreen.-middle MetricsPanel {
        layer: default;
        dock: none;
        height: 50%;
    }

    ChatScreen.-wide MetricsPanel {
        layer: default;
        dock: none;
        width: 46;
    }

    ChatScreen.-short MetricsPanel {
        layer: above;
        dock: right;
        width: 100%;
        height: 100%;
    }

    ChatScreen.-short.-wide MetricsPanel {
        layer: default;
        dock: none;
        width: 46;
    }

    .panel--plain, .panel--quiet, .panel--heading, .panel--metric, .panel--spark, .panel--bar,
    .panel--rule, .panel--about, .panel--marked, .panel--weights, .panel--kv, .panel--compute,
    .panel--overhead {
        background: $surface;
    }

    .panel--plain, .panel--about { color: $foreground; }
    .panel--quiet { color: $text-muted; }
    .panel--heading, .panel--weights { color: $primary; }
    .panel--metric, .panel--marked, .panel--kv { color: $accent; }
    .panel--spark { color: $text-muted; }
    .panel--compute { color: $secondary; }
    .panel--bar, .panel--overhead { color: $success; }
    .panel--rule { color: $panel-lighten-2; }
    .panel--heading, .panel--metric { text-style: bold; }
    .panel--about { text-style: italic; }
    """
    COMPONENT_CLASSES: ClassVar[set[str]] = {f"panel--{style}" for style in _STYLES}

    marked: reactive[int] = reactive(0, repaint=True)
    """Index of the marked row."""

    def __init__(self, status: EngineStatus, *, id: str) -> None:  # noqa: A002 - textual's word
        super().__init__(id=id)
        self.display = False
        self._status = status
        self._rows: tuple[MetricRow, ...] = ()
        self._top = 0
        """Index of the first visible row."""

    def refresh_metrics(self) -> None:
        """Redraw if the rows changed."""
        if not self.display:
            return
        rows = panel_rows(self._status, max(8, self._column_width - 3))
        if rows != self._rows:
            self._rows = rows
            self.refresh()

    def on_show(self) -> None:
        self.refresh_metrics()

    def on_resize(self) -> None:
        self.refresh_metrics()
        self._scroll_to_marked()

    def action_metric(self, step: int) -> None:
        """Mark the next metric (`step` 1) or the previous one (-1)."""
        rows = self._metric_rows()
        if not rows:
            return
        index = next((n for n, row in enumerate(rows) if row >= self.marked), 0)
        if rows[index] == self.marked or step < 0:
            index = max(0, min(len(rows) - 1, index + step))
        self.marked = rows[index]
        self._scroll_to_marked()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        self._mark(event.x, event.y)

    def on_click(self, event: events.Click) -> None:
        self.focus()
        self._mark(event.x, event.y)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        for _ in range(2):
            if self._end < len(self._rows):
                self._top += 1
        self.refresh()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._top = max(0, self._top - 2)
        self.refresh()

    def _mark(self, x: int, y: int) -> None:
        """Mark the metric at a position of the widget."""
        column = self._column_ranges()[min(x // self._column_width, self._columns - 1)]
        if y < len(column) and self._rows[column[y]].metric:
            self.marked = column[y]

    def _metric_rows(self) -> list[int]:
        """Return the index of the first row of each metric."""
        rows = []
        previous = ""
        for index, row in enumerate(self._rows):
            if row.metric and row.metric != previous:
                rows.append(index)
            previous = row.metric
        return rows

    def _scroll_to_marked(self) -> None:
        self._top = max(0, min(self._top, self.marked - 1))
        while self.marked >= self._end and self._top < self.marked:
            self._top += 1

    @property
    def _room(self) -> int:
        """Number of lines for metrics. The lines below them explain the marked one."""
        return max(1, self.size.height - self._about_rows)

    @property
    def _columns(self) -> int:
        return 2 if self.size.width >= _MIN_TWO_COLUMNS else 1

    @property
    def _column_width(self) -> int:
        return max(1, self.size.width // self._columns)

    @property
    def _about_rows(self) -> int:
        """Number of lines for the explanation. A wide panel needs fewer."""
        return _ABOUT_ROWS - self._columns + 1

    def _column_ranges(self) -> list[range]:
        return column_ranges(self._rows, self._top, self._room, self._columns)

    @property
    def _end(self) -> int:
        """Index after the last visible row."""
        return self._column_ranges()[-1].stop

    @property
    def metric(self) -> str:
        """Name of the marked metric. Empty if none is marked."""
        if self.marked < len(self._rows):
            return self._rows[self.marked].metric
        return ""

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if y >= self._room:
            return self._row_strip(self._explanation(y - self._room, width - 3), width)
        strips = [self._column_strip(column, y) for column in self._column_ranges()]
        return Strip.join(strips).adjust_cell_length(width, self.style_of("panel--plain"))

    def _column_strip(self, column: range, y: int) -> Strip:
        row = _BLANK
        if y < len(column):
            row = self._rows[column[y]]
        is_marked = bool(row.metric) and row.metric == self.metric and self.has_focus
        return self._row_strip(row.pieces, self._column_width, marked=is_marked)

    def _explanation(self, line: int, width: int) -> tuple[Piece, ...]:
        """Return a line of the explanation: a rule, then the sentence about the marked metric."""
        if line == 0:
            if self._end >= len(self._rows):
                return (_piece("─" * width, "rule"),)
            rule = "─" * (width - len("── ↓ more "))
            return _piece("── ", "rule"), _piece("↓ more ", "quiet"), _piece(rule, "rule")
        if not self.metric:
            hint = "Point at a metric, or press Tab."
            return tuple(_piece(row, "quiet") for row in wrap(hint, width)[line - 1 : line])
        sentence = wrap(METRICS[self.metric].about, width)
        if line > len(sentence):
            return ()
        text = sentence[line - 1]
        if line == self._about_rows - 1 < len(sentence):
            text = f"{text[: width - 1]}…"
        return (_piece(text, "about"),)

    def _row_strip(self, pieces: tuple[Piece, ...], width: int, *, marked: bool = False) -> Strip:
        base = self.style_of("panel--plain")
        sign = Segment("▎" if marked else " ", self.style_of("panel--marked"))
        segments = [sign, Segment(" ", base)]
        segments += [
            Segment(piece.text, self.style_of(f"panel--{piece.look.tint}")) for piece in pieces
        ]
        return Strip(segments).adjust_cell_length(width, base)

    def on_focus(self) -> None:
        if not self.metric:
            self.action_metric(1)
        self.refresh()

    def on_blur(self) -> None:
        self.refresh()
