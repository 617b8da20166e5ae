"""The status bar: one line of metrics at the bottom of the screen."""

import time
from typing import ClassVar, Final, NamedTuple

from rich.segment import Segment
from textual.geometry import Region
from textual.strip import Strip

from localchat.sanitize import sanitize_line
from localchat.session.engine_status import EngineStatus
from localchat.session.progress import time_left
from localchat.tui.textual_internals.flat_widget import FlatWidget
from localchat.tui.widgets.charts import bar, sparkline
from localchat.units import decimal, rate, used_of

_KV_CELLS: Final = 6
_SPARK_CELLS: Final = 12
_ORNAMENT: Final = 7
"""Rank from which parts only repeat the information of other parts."""
_PLACEMENT: Final = 9


class StatusPart(NamedTuple):
    """A part of the status bar."""

    text: str
    style: str = "quiet"
    """A component class without its prefix."""
    rank: int = 0
    """Order of omission: a short bar omits the highest rank first."""
    glued: bool = False
    """Whether one space separates it from the part before, instead of three."""


_MARKS: Final = {
    "starting": ("◌", "wait"),
    "ready": ("●", "ready"),
    "sent": ("○", "wait"),
    "queued": ("◌", "wait"),
    "loading": ("◔", "wait"),
    "prefill": ("◑", "busy"),
    "thinking": ("◕", "busy"),
    "writing": ("●", "busy"),
    "asking": ("◌", "wait"),
    "calling": ("◑", "busy"),
    "broken": ("●", "broken"),
}


def status_parts(status: EngineStatus) -> tuple[StatusPart, ...]:
    """Return all parts, in order."""
    mark, style = _MARKS[status.state]
    parts = [StatusPart(mark, style), StatusPart(status.label, "state", glued=True)]
    if status.pulling:
        parts.append(StatusPart(status.pulling, "busy", 6))
    if status.prefill_tokens_per_s is not None:
        parts.append(StatusPart(rate(status.prefill_tokens_per_s), "metric", 4))
        if left := time_left(status, time.monotonic()):
            parts.append(StatusPart(left, rank=1))
    if status.ttft_s is not None:
        parts.append(StatusPart(f"TTFT {decimal(status.ttft_s, 2)} s", rank=3))
    if status.decode_tokens_per_s is not None:
        speed = f"{decimal(status.decode_tokens_per_s, 1)} tok/s"
        parts.append(StatusPart(speed, "metric", 1))
        spark = sparkline(status.rates, _SPARK_CELLS)
        if spark:
            parts.append(StatusPart(spark, "spark", 8, glued=True))
    used, total = status.kv
    if total:
        parts.append(StatusPart(f"KV {used_of(used, total)}", rank=2))
        if used:
            parts.append(StatusPart(bar(used, total, _KV_CELLS), "bar", 7, glued=True))
    accepted, drafted = status.drafts
    if drafted:
        parts.append(StatusPart(f"drafts {accepted:,}/{drafted:,}", rank=5))
    if status.placement:
        parts.append(StatusPart(status.placement, rank=_PLACEMENT))
    return tuple(parts)


def fit_parts(parts: tuple[StatusPart, ...], width: int) -> tuple[StatusPart, ...]:
    """Return the parts that fit into `width` cells. Omits parts of high rank first."""
    kept = list(parts)
    while _total_cells(kept) > width and any(part.rank for part in kept):
        kept.remove(max(kept, key=lambda part: part.rank))
    return tuple(kept)


def fit_with_hint(
    hint: str, parts: tuple[StatusPart, ...], width: int, min_rank: int = _ORNAMENT
) -> tuple[StatusPart, ...]:
    """Return the parts to show next to a hint in `width` cells.

    The hint displaces only parts of rank `min_rank` and above. If those do not suffice, returns all parts that
    fit without the hint.
    """
    shorter = fit_parts(parts, width - len(hint))
    if all(part in shorter or part.rank >= min_rank for part in parts):
        return shorter
    return fit_parts(parts, width)


def _total_cells(parts: list[StatusPart]) -> int:
    return sum(len(part.text) + (1 if part.glued else 3) for part in parts)


class StatusBar(FlatWidget):
    """Draws one row of parts. Redraws only if its text changed."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "status--quiet",
        "status--state",
        "status--metric",
        "status--spark",
        "status--bar",
        "status--ready",
        "status--wait",
        "status--busy",
        "status--broken",
    }

    def __init__(self, status: EngineStatus, *, id: str) -> None:  # noqa: A002 - textual's word
        super().__init__(id=id)
        self._status = status
        self._shown: tuple[StatusPart, ...] = ()
        self._shown_hint = ""
        self.hint = ""
        """Keys that are useful now."""
        self.urgent = False
        """Whether the hint is more important than ornaments."""

    def refresh_metrics(self) -> None:
        """Redraw if the text changed."""
        min_rank = _ORNAMENT if self.urgent else _PLACEMENT
        all_parts = status_parts(self._status)
        parts = fit_with_hint(self.hint, all_parts, self.size.width - 2, min_rank)
        if (parts, self.hint) != (self._shown, self._shown_hint):
            self._shown = parts
            self._shown_hint = self.hint
            self.refresh(Region(0, 0, self.size.width, 1))

    def on_resize(self) -> None:
        self._shown = ()
        self.refresh_metrics()

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        base = self.style_of("")
        if y:
            return Strip.blank(width, base)
        segments = [Segment(" ", base)]
        for index, part in enumerate(self._shown):
            if index:
                segments.append(Segment(" " if part.glued else "   ", base))
            style = self.style_of(f"status--{part.style}")
            segments.append(Segment(sanitize_line(part.text), style))
        used = sum(segment.cell_length for segment in segments)
        room = width - used - len(self.hint) - 1
        if self.hint and room > 2:
            style = self.style_of("status--quiet")
            segments += [Segment(" " * room, base), Segment(self.hint, style)]
        return Strip(segments).adjust_cell_length(width, base)
