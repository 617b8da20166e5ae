"""The metrics panel: rows built from the engine's status, and the widget that shows them."""

import time
from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Final, TypeAlias

from textual.app import ComposeResult
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.widgets import Static

from localchat import metrics, units
from localchat.engine.events import EngineStats, MetricsSnapshot, RunningRequest
from localchat.engine.interface import MemoryParts
from localchat.engine.stats_line import read_back
from localchat.metrics import METRICS
from localchat.sanitize import sanitize_line
from localchat.session.engine_status import EngineStatus
from localchat.session.progress import time_left
from localchat.tui.widgets.charts import bar, shares, sparkline
from localchat.units import size, used_of

Piece: TypeAlias = tuple[str, str]
"""Text and its style."""
MetricRow: TypeAlias = tuple[Piece, ...]


_PLAIN: Final = "$foreground"
_QUIET: Final = "$text-muted"
_HEADING: Final = "bold $primary"
_METRIC: Final = "bold $accent"
_BAR: Final = "$success"
_KV: Final = "$accent"


_MEMORY: Final = (
    ("weights", "weights_bytes", "$primary"),
    ("KV", "kv_bytes", _KV),
    ("compute", "compute_bytes", "$secondary"),
    ("overhead", "overhead_bytes", "$success"),
)
"""Label, name and style of each part of the memory."""
_MIN_PLAN_ERROR_BYTES: Final = 1_000_000
_NO_METRICS: Final = MetricsSnapshot("queued")


def panel_sections(status: EngineStatus, width: int) -> list[list[MetricRow]]:
    """Build the sections of a panel whose columns are `width` cells wide."""
    sections = (_memory, _kv_cache, _speed, _speculation, _prefix_cache, _engine)
    return [rows for section in sections if (rows := list(section(status, width)))]


def _heading(title: str, right: str, width: int) -> MetricRow:
    space = max(1, width - len(title) - len(right))
    return (title, _HEADING), (" " * space, ""), (right, _QUIET)


def _line(
    metric: str, value: str, width: int, *, style: str = _PLAIN, label: str = ""
) -> MetricRow:
    """Return a row with the label of a metric and its value, aligned right."""
    label = label or METRICS[metric].label
    space = max(1, width - len(label) - len(value))
    return (label, _QUIET), (" " * space, ""), (value, style)


def _bar(part: float, total: float, width: int) -> MetricRow:
    return ((bar(part, total, width), _BAR),)


def _wrapped(text: str, width: int) -> Iterator[MetricRow]:
    for line in wrap(sanitize_line(text), width):
        yield ((line, _QUIET),)


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
        yield (
            ("█ ", style),
            (label, _QUIET),
            (" " * space, ""),
            (value, _PLAIN),
            (plan_note, _QUIET),
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
        ("█" * cells, style)
        for cells, (_, _, style) in zip(part_cells, _MEMORY, strict=True)
        if cells
    ]
    pieces.append(("·" * free_cells, _QUIET))
    pieces.append((f" {METRICS[metric].label:>7}", _QUIET))
    return tuple(pieces)


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
    yield ("█" * used_cells, _KV), ("▒" * cached_cells, _KV), ("·" * free_cells, _QUIET)
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
        yield _line("prefill_tokens_per_s", value, width, style=_METRIC)
        yield _bar(status.prefill.done, status.prefill.total, width)
        left = time_left(status, time.monotonic()).removesuffix(" left")
        yield _line("prefill_done_tokens", left or "-", width, label="  time left")
        return
    yield _line("ttft_s", f"{units.decimal(status.ttft_s, 2)} s", width)
    value = "-"
    if decode_rate is not None:
        value = units.rate(decode_rate)
    yield _line("decode_tokens_per_s", value, width, style=_METRIC)
    if spark := sparkline(status.rates, width):
        yield ((spark, _QUIET),)
    if status.done is not None and status.done.timings.prefill_tokens_per_s is not None:
        value = units.rate(status.done.timings.prefill_tokens_per_s)
        yield _line("prefill_tokens_per_s", value, width)
    for name, milliseconds in _percentiles(status, times):
        yield _line(name, f"{units.decimal(milliseconds, 1)} ms", width)


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
        yield _bar(accepted, drafted, width)
    stats = status.stats
    if stats is not None and stats.draft_steps:
        length = stats.accepted / stats.draft_steps
        yield _line("accepted_length", _token_count(f"{length:.2f}"), width)
    if status.done is not None and status.done.speculation.speedup is not None:
        yield _line("speedup", f"× {status.done.speculation.speedup:.2f}", width)
    if why_off:
        yield from _wrapped(why_off, width)


def _prefix_cache(status: EngineStatus, width: int) -> Iterator[MetricRow]:
    prefill = status.prefill
    if prefill is None:
        return
    share = _token_count(f"{prefill.cached:,}/{prefill.total:,}")
    yield _heading("Prefix cache", share, width)
    yield _bar(prefill.cached, prefill.total, width)
    if prefill.read_back:
        text = read_back(prefill.read_back, prefill.total, prefill.read_s)
        yield from _wrapped(text, width)
    if prefill.why_missed:
        yield from _wrapped(f"missed: {prefill.why_missed}", width)


def _engine(status: EngineStatus, width: int) -> Iterator[MetricRow]:
    info = status.info
    if info is None:
        return
    yield _heading("Engine", sanitize_line(info.backend), width)
    yield _line("fingerprint", sanitize_line(info.model)[: width - len("model   ")], width)
    for adapter in info.adapters:
        yield from _wrapped(f"LoRA {sanitize_line(adapter)}", width)
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


_MIN_TWO_COLUMNS: Final = 76
"""Width from which the sections have two columns. Half of it cuts no row."""


def columns_of(sections: Sequence[list[MetricRow]], count: int) -> list[list[MetricRow]]:
    """Divide sections among columns of similar height, with a blank row between two."""
    height = sum(len(section) + 1 for section in sections) / count
    columns: list[list[MetricRow]] = [[] for _ in range(count)]
    index = 0
    for section in sections:
        column = columns[index]
        if column and index + 1 < count and len(column) + len(section) / 2 > height:
            index += 1
            column = columns[index]
        if column:
            column.append(())
        column += section
    return columns


class MetricsPanel(VerticalScroll):
    """Sections of metrics in one or two columns. The help (F1) explains each metric."""

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

    MetricsPanel Horizontal { height: auto; }
    MetricsPanel Static { width: 1fr; padding: 0 1 0 2; }
    """

    def __init__(self, status: EngineStatus, *, id: str) -> None:  # noqa: A002 - textual's word
        super().__init__(id=id)
        self.display = False
        self._status = status
        self._columns: list[list[MetricRow]] = []

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield Static("", markup=False)
            yield Static("", markup=False)

    def refresh_metrics(self) -> None:
        """Redraw if the rows changed."""
        if not self.display or not self.is_mounted:
            return
        count = 1
        if self.size.width >= _MIN_TWO_COLUMNS:
            count = 2
        width = max(8, self.scrollable_content_region.width // count - 3)
        columns = columns_of(panel_sections(self._status, width), count)
        if columns == self._columns:
            return
        self._columns = columns
        for index, static in enumerate(self.query(Static)):
            static.display = index < count
            if static.display:
                lines = [Content.assemble(*row) for row in columns[index]]
                static.update(Content("\n").join(lines))

    def on_show(self) -> None:
        self.refresh_metrics()

    def on_resize(self) -> None:
        self.refresh_metrics()
