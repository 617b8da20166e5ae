"""The metrics panel: rows built from the engine's status, and the widget that draws them.

It is one widget: twelve small ones cost twice as much.
"""

import time
from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import ClassVar, Final, NamedTuple

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import BindingType
from textual.reactive import reactive
from textual.strip import Strip
from textual.widget import Widget

from localchat import metrics, units
from localchat.engine.events import EngineStats, RunningRequest
from localchat.engine.interface import MemoryParts
from localchat.engine.stats_line import read_back
from localchat.metrics import METRICS
from localchat.sanitize import sanitize_line
from localchat.session.engine_status import EngineStatus
from localchat.session.progress import time_left
from localchat.tui.keymap import bindings
from localchat.tui.metric_words import MetricWords
from localchat.tui.transcript.markdown.rows import Look, Piece
from localchat.tui.widgets.charts import bar, histogram, shares, sparkline
from localchat.units import size, used_of


class MetricRow(NamedTuple):
    """One row of the panel."""

    pieces: tuple[Piece, ...]
    metric: str = ""
    """Name in the table of metrics, which explains it; empty for rules and headings."""
    term: str = ""
    """Its label among the terms of the field."""


def _piece(text: str, style: str = "plain") -> Piece:
    """Text in a component style of the panel (its name without the prefix)."""
    return Piece(text, Look(style))


_BLANK: Final = MetricRow(())
_MEMORY: Final = (
    ("weights", "weights_bytes", "weights"),
    ("KV", "kv_bytes", "kv"),
    ("compute", "compute_bytes", "compute"),
    ("overhead", "overhead_bytes", "overhead"),
)


class _Panel(NamedTuple):
    """How rows are written."""

    width: int
    words: MetricWords


def panel_rows(status: EngineStatus, width: int, words: MetricWords) -> tuple[MetricRow, ...]:
    """All rows of a panel that is `width` cells wide inside."""
    sections = (_memory, _kv, _speed, _speculation, _prefix, _engine)
    rows: list[MetricRow] = []
    for section in sections:
        found = list(section(status, _Panel(width, words)))
        if found:
            rows += [_BLANK, *found] if rows else found
    return tuple(rows)


def _heading(term: str, right: str, panel: _Panel) -> MetricRow:
    left = panel.words.label(term)
    space = max(1, panel.width - len(left) - len(right))
    return MetricRow((_piece(left, "heading"), _piece(" " * space), _piece(right, "quiet")))


def _line(term: str, value: str, metric: str, panel: _Panel, style: str = "plain") -> MetricRow:
    label = panel.words.label(term)
    space = max(1, panel.width - len(label) - len(value))
    pieces = (_piece(label, "quiet"), _piece(" " * space), _piece(value, style))
    return MetricRow(pieces, metric, term)


def _words(text: str, metric: str, panel: _Panel, style: str = "quiet") -> Iterator[MetricRow]:
    for line in wrap(sanitize_line(text), panel.width):
        yield MetricRow((_piece(line, style),), metric)


# ---------------------------------------------------------------------------- memory


def _memory(status: EngineStatus, panel: _Panel) -> Iterator[MetricRow]:
    info = status.info
    if info is None:
        yield _heading("Memory", "after the load", panel)
        return
    if info.backend == "remote":
        return
    actual = info.actual
    predicted = info.predicted
    shown = actual or predicted
    total = info.actual_bytes or info.predicted_bytes
    if shown is not None:  # the sum of the rows below, mapped pages that nobody needs included
        total = sum(max(0, getattr(shown, name)) for _, name, _ in _MEMORY)
    yield _heading("Memory", f"{size(total)} of {size(info.free_bytes)}" if total else "-", panel)
    if actual is not None:
        yield _stacked(actual, info.free_bytes, panel, "actual", "actual_bytes")
    elif predicted is not None:
        yield _stacked(predicted, info.free_bytes, panel, "planned", "predicted_bytes")
    if shown is None:
        return
    for term, name, style in _MEMORY:
        now = getattr(shown, name)
        planned = getattr(predicted, name) if predicted is not None else -1
        plan_note = ""
        if actual is not None and _is_off_plan(now, planned):
            plan_note = f"  planned {size(planned)}"
        value = "-" if now < 0 else size(now)
        label = panel.words.label(term)
        space = max(1, panel.width - 2 - len(label) - len(value) - len(plan_note))
        yield MetricRow(
            (
                _piece("█ ", style),
                _piece(label, "quiet"),
                _piece(" " * space),
                _piece(value),
                _piece(plan_note, "quiet"),
            ),
            name,
            term,
        )
    left = info.free_bytes - total
    if info.free_bytes:
        yield _line("· free", size(max(0, left)), "free_bytes", panel)


def _is_off_plan(actual_bytes: int, planned_bytes: int) -> bool:
    """Whether a difference between memory and its plan is worth showing."""
    if actual_bytes < 0 or planned_bytes < 0:
        return False
    return abs(actual_bytes - planned_bytes) > max(1_000_000, planned_bytes // 20)


def _stacked(parts: MemoryParts, free: int, panel: _Panel, label: str, metric: str) -> MetricRow:
    """One bar of weights, KV, buffers and free memory."""
    room = panel.width - len("planned ")
    counts = [max(0, getattr(parts, name)) for _, name, _ in _MEMORY]
    counts.append(max(0, free - sum(counts)))
    cells = shares(counts, room)
    styles = [style for _, _, style in _MEMORY]
    pieces = [_piece("█" * n, style) for n, style in zip(cells[:-1], styles, strict=True) if n]
    pieces += [_piece("·" * cells[-1], "quiet"), _piece(f" {label:>7}", "quiet")]
    return MetricRow(tuple(pieces), metric)


# ---------------------------------------------------------------------------- KV


def _kv(status: EngineStatus, panel: _Panel) -> Iterator[MetricRow]:
    used, total = status.kv
    if not total:
        return
    yield _heading("KV cache", panel.words.kv_share(used, total), panel)
    now = status.metrics or (status.stats.now if status.stats else None)
    if status.stats is not None and not status.busy:
        now = status.stats.now
        used = now.kv_used_tokens  # the last request has freed its tokens
    shared = now.kv_shared_tokens if now else 0
    cached = now.kv_cached_tokens if now else 0
    swapped = now.kv_parked_tokens if now else 0
    cells = shares([used, cached, max(0, total - used - cached)], panel.width)
    yield MetricRow(
        (
            _piece("█" * cells[0], "kv"),
            _piece("▒" * cells[1], "kv"),
            _piece("·" * cells[2], "quiet"),
        ),
        "kv_total_tokens",
    )
    yield _line("live", panel.words.tokens(f"{used:,}"), "kv_used_tokens", panel)
    if shared:
        yield _line("  of it shared", panel.words.tokens(f"{shared:,}"), "kv_shared_tokens", panel)
    yield _line("cached", panel.words.tokens(f"{cached:,}"), "kv_cached_tokens", panel)
    if swapped:
        words = panel.words.tokens(f"{swapped:,}")
        yield _line("swapped to RAM", words, "kv_parked_tokens", panel)
    if status.stats is not None and status.stats.evictions:
        yield _line("evictions", f"{status.stats.evictions:,}", "evictions", panel)


# ---------------------------------------------------------------------------- speed


def _speed(status: EngineStatus, panel: _Panel) -> Iterator[MetricRow]:
    rate = status.decode_tokens_per_s
    times = status.stats.tpot_ms if status.stats else ()
    prefill = status.prefill_tokens_per_s
    if status.ttft_s is None and rate is None and prefill is None and not times:
        return
    yield _heading("Speed", panel.words.phase(status.state), panel)
    if prefill is not None and status.prefill is not None:
        yield _line(
            "prefill", panel.words.prefill_rate(prefill), "prefill_tokens_per_s", panel, "metric"
        )
        drawn = bar(status.prefill.done, status.prefill.total, panel.width)
        yield MetricRow((_piece(drawn, "bar"),), "prefill_done_tokens")
        left = time_left(status, time.monotonic()).removesuffix(" left")
        yield _line("  time left", left or "-", "prefill_done_tokens", panel)
        return  # figures of the answer before would be read as those of this one
    yield _line("TTFT", f"{units.decimal(status.ttft_s, 2)} s", "ttft_s", panel)
    speed = panel.words.decode_rate(status) or "-"
    yield _line("decode", speed, "decode_tokens_per_s", panel, "metric")
    spark = sparkline(status.rates, panel.width)
    if spark:
        yield MetricRow((_piece(spark, "spark"),), "decode_tokens_per_s")
    done = status.done
    if done is not None and done.timings.prefill_tokens_per_s is not None:
        measured = panel.words.prefill_rate(done.timings.prefill_tokens_per_s)
        yield _line("prefill", measured, "prefill_tokens_per_s", panel)
    for name, value in _percentiles(status, times):
        yield _line(f"TPOT {name}", f"{units.decimal(value, 1)} ms", f"tpot_ms_{name}", panel)
    drawn, low, high = histogram(times, panel.width)
    if drawn:
        yield MetricRow((_piece(drawn, "spark"),), "tpot_ms")
        left = f"{low:.1f}"
        right = f"{high:.1f} ms"
        space = " " * max(1, panel.width - len(left) - len(right))
        yield MetricRow((_piece(left + space + right, "quiet"),), "tpot_ms")


def _percentiles(
    status: EngineStatus, times: Sequence[float]
) -> Iterator[tuple[str, float | None]]:
    """Percentiles of TPOT: of the last request once it is over, else of the latest tokens."""
    done = status.done.timings if status.done else None
    for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        yield name, getattr(done, f"tpot_ms_{name}") if done else metrics.percentile(times, share)


# ---------------------------------------------------------------------------- speculation, prefix, engine


def _speculation(status: EngineStatus, panel: _Panel) -> Iterator[MetricRow]:
    accepted, drafted = status.drafts
    off = status.metrics.speculation_off if status.metrics else ""
    off = status.done.speculation.off if status.done else off
    if not drafted and not off:
        return
    share = metrics.acceptance(drafted, accepted)
    yield _heading("Speculation", "off" if off and not drafted else "on", panel)
    if drafted:
        value = used_of(accepted, drafted) if share is not None else "-"
        yield _line("accepted", value, "acceptance", panel)
        yield MetricRow((_piece(bar(accepted, drafted, panel.width), "bar"),), "acceptance")
    stats = status.stats
    if stats is not None and stats.draft_steps:
        length = panel.words.tokens(f"{stats.accepted / stats.draft_steps:.2f}")
        yield _line("mean accepted", length, "accepted_length", panel)
    if status.done is not None and status.done.speculation.speedup is not None:
        yield _line("net gain", f"× {status.done.speculation.speedup:.2f}", "speedup", panel)
    if off:
        yield from _words(off, "speculation_off", panel)


def _prefix(status: EngineStatus, panel: _Panel) -> Iterator[MetricRow]:
    prefill = status.prefill
    if prefill is None:
        return
    yield _heading(
        "Prefix cache", panel.words.tokens(f"{prefill.cached:,}/{prefill.total:,}"), panel
    )
    yield MetricRow(
        (_piece(bar(prefill.cached, prefill.total, panel.width), "bar"),), "cached_tokens"
    )
    if prefill.read_back:
        back = read_back(prefill.read_back, prefill.total, prefill.read_s)
        yield from _words(back, "cached_tokens", panel)
    if prefill.why_missed:
        yield from _words(f"missed: {prefill.why_missed}", "why_missed", panel)


def _engine(status: EngineStatus, panel: _Panel) -> Iterator[MetricRow]:
    info = status.info
    stats = status.stats
    if info is None:
        return
    yield _heading("Engine", sanitize_line(info.backend), panel)
    yield _line("model", sanitize_line(info.model)[: panel.width - 8], "fingerprint", panel)
    if info.context_tokens:
        yield _line(
            "context", panel.words.tokens(f"{info.context_tokens:,}"), "context_tokens", panel
        )
    if info.backend == "remote":
        return  # a server reports no more
    yield _line("threads", f"{info.threads}", "threads", panel)
    yield _line("layers on the GPU", f"{info.gpu_layers}/{info.layers}", "gpu_layers", panel)
    if stats is not None:
        yield from _clients(status, stats, panel)


def _clients(status: EngineStatus, stats: EngineStats, panel: _Panel) -> Iterator[MetricRow]:
    yield _line("running", f"{stats.now.running}", "running", panel)
    yield _line("waiting", f"{stats.now.waiting}", "waiting", panel)
    for one in stats.requests:
        user = sanitize_line(one.user) or "this chat"
        count = panel.words.tokens(_tokens_of(one, status))
        value = f"{panel.words.phase(one.phase)} {count}, {units.duration(one.age_s)}"
        yield _line(f"  {user}"[: panel.width - len(value) - 1], value, "running", panel)


def _tokens_of(request: RunningRequest, status: EngineStatus) -> str:
    """Tokens generated; while the prompt is computed, those of the prompt."""
    if request.phase == "decode":
        return f"{request.completion_tokens:,}"
    if status.prefill is not None and not request.user:
        return f"{status.prefill.done:,}/{request.prompt_tokens:,}"
    return f"{request.prompt_tokens:,}"


# ---------------------------------------------------------------------------- widget


_ABOUT_ROWS: Final = 4
_TWO_COLUMNS: Final = 76
"""Width from which the rows have two columns: half of it cuts no row."""
_STYLES: Final = (
    *("plain", "quiet", "heading", "metric", "spark", "bar", "rule", "about", "marked"),
    *("weights", "kv", "compute", "overhead"),
)


class MetricsPanel(Widget, can_focus=True):
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

    def __init__(self, status: EngineStatus, *, id: str) -> None:  # noqa: A002 - textual's word
        super().__init__(id=id)
        self.display = False
        self._status = status
        self.words = MetricWords(technical=False)
        self._rows: tuple[MetricRow, ...] = ()
        self._style_cache: dict[str, Style] = {}
        self._top = 0

    def refresh_metrics(self) -> None:
        """Redraw if the rows changed."""
        if not self.display:
            return
        rows = panel_rows(self._status, max(8, self._column_width - 3), self.words)
        if rows != self._rows:
            self._rows = rows
            self.refresh()

    def on_show(self) -> None:
        self.refresh_metrics()

    def on_resize(self) -> None:
        self.refresh_metrics()
        self._scroll_to_marked()

    # ------------------------------------------------------------------ the marked metric

    def action_metric(self, step: int) -> None:
        """Mark the next metric (`step` 1) or the previous one (-1)."""
        rows = self._metric_rows()
        if not rows:
            return
        at = next((n for n, row in enumerate(rows) if row >= self.marked), 0)
        if rows[at] == self.marked or step < 0:
            at = max(0, min(len(rows) - 1, at + step))
        self.marked = rows[at]
        self._scroll_to_marked()

    def on_mouse_move(self, event: events.MouseMove) -> None:
        self._mark_at(event.x, event.y)

    def on_click(self, event: events.Click) -> None:
        self.focus()
        self._mark_at(event.x, event.y)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._top = max(0, min(self._top + 2, len(self._rows) - self._visible_rows))
        self.refresh()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._top = max(0, self._top - 2)
        self.refresh()

    def _mark_at(self, x: int, y: int) -> None:
        at = self._top + min(x // self._column_width, self._columns - 1) * self._room + y
        if y < self._room and at < len(self._rows) and self._rows[at].metric:
            self.marked = at

    def _metric_rows(self) -> list[int]:
        """The first row of each metric."""
        found = []
        before = ""
        for at, row in enumerate(self._rows):
            if row.metric and row.metric != before:
                found.append(at)
            before = row.metric
        return found

    def _scroll_to_marked(self) -> None:
        self._top = max(0, min(self._top, self.marked - 1))
        if self.marked >= self._top + self._visible_rows:
            self._top = self.marked - self._visible_rows + 1

    @property
    def _room(self) -> int:
        """Number of rows for metrics; the others are for the sentence."""
        return max(1, self.size.height - self._about_rows)

    @property
    def _columns(self) -> int:
        return 2 if self.size.width >= _TWO_COLUMNS else 1

    @property
    def _column_width(self) -> int:
        return max(1, self.size.width // self._columns)

    @property
    def _about_rows(self) -> int:
        """Number of rows for the sentence: fewer in a wide panel."""
        return _ABOUT_ROWS - self._columns + 1

    @property
    def _visible_rows(self) -> int:
        """Number of visible rows in all columns."""
        return self._room * self._columns

    @property
    def metric(self) -> str:
        """Name of the marked metric; empty if none is."""
        row = self._rows[self.marked] if self.marked < len(self._rows) else None
        return row.metric if row else ""

    # ------------------------------------------------------------------ rendering

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        if y >= self._room:
            return self._row_strip(self._about(y - self._room, width - 3), width, marked=False)
        first = self._top + y
        columns = (self._column_strip(first + n * self._room) for n in range(self._columns))
        return Strip.join(columns).adjust_cell_length(width, self._style_of("plain"))

    def _column_strip(self, at: int) -> Strip:
        row = self._rows[at] if at < len(self._rows) else MetricRow(())
        marked = bool(row.metric) and row.metric == self.metric and self.has_focus
        return self._row_strip(row.pieces, self._column_width, marked=marked)

    def _about(self, line: int, width: int) -> tuple[Piece, ...]:
        if line == 0:
            if self._top + self._visible_rows >= len(self._rows):
                return (_piece("─" * width, "rule"),)
            line_right = "─" * (width - len("── ↓ more "))
            return _piece("── ", "rule"), _piece("↓ more ", "quiet"), _piece(line_right, "rule")
        if not self.metric:
            hint = "Point at one, or press Tab until ▎ shows."
            return tuple(_piece(row, "quiet") for row in wrap(hint, width)[line - 1 : line])
        term = self._rows[self.marked].term
        sentences = wrap(self.words.explained(term, METRICS[self.metric].about), width)
        rows = self._about_rows - 1
        if line - 1 >= len(sentences):
            return ()
        last = line == rows and len(sentences) > rows
        text = sentences[line - 1]
        return (_piece(text[: width - 1] + "…" if last else text, "about"),)

    def _row_strip(self, pieces: tuple[Piece, ...], width: int, *, marked: bool) -> Strip:
        base = self._style_of("plain")
        sign = Segment("▎" if marked else " ", self._style_of("marked"))
        segments = [sign, Segment(" ", base)]
        segments += [Segment(piece.text, self._style_of(piece.look.tint)) for piece in pieces]
        return Strip(segments).adjust_cell_length(width, base)

    def _style_of(self, name: str) -> Style:
        """A component style. Cached: Textual builds it anew on every call."""
        if name not in self._style_cache:
            self._style_cache[name] = self.get_component_rich_style(f"panel--{name}")
        return self._style_cache[name]

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._style_cache = {}

    def on_focus(self) -> None:
        if not self.metric:
            self.action_metric(1)
        self.refresh()

    def on_blur(self) -> None:
        self.refresh()
