"""Cost of a step by its number of tokens, learned from the steps themselves.

Shared by the proposers, the output processor and the engine core.
"""

from bisect import bisect_left
from collections.abc import Sequence

_FOLLOW = 0.2
_DRIFT = 0.1
_UNSEEN_SLOPE = 0.15
_MOST_OVER_WIDER = 1.1
_FORGET = 0.99
"""Factor for what is known of a width by one step alone, with each step of another width."""


class CostModel:
    """Seconds of a step by its rows (tokens computed). One for each runner, shared by its sequences.

    An estimate is a common scale times a shape. Steps grow with the context and with other work on the
    machine, all sizes together: every step moves the scale, and its own size the shape. Sizes never seen are
    interpolated; beyond the largest, a token is taken to cost 15 % of a plain step, which is optimistic on a
    CPU and corrected by the first such step. That one may have been slow by chance, and would then be the last:
    it is forgotten little by little until there is a second, and the shorter of the two counts.
    """

    def __init__(self, widths: Sequence[int] = ()) -> None:
        """`widths`: row counts that steps are padded to, ascending: all of one width cost the same, so drafts
        fill it. Empty: none are padded."""
        self._widths = widths
        self._gap_s = self._more_s = 0.0
        self._scale = 0.0
        self._shape: dict[int, float] = {}
        self._once: dict[int, float] = {}
        """What the only step of a width told."""

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a step of `rows` tokens."""
        rows = self.padded(rows)
        if seconds <= 0:
            return
        if not self._shape:
            self._scale = seconds
            self._shape[rows] = 1.0
            return
        if rows not in self._shape:
            # Little more than a wider step: this one may have been slow by chance, and stay the only one.
            wider = min((seen for seen in self._shape if seen > rows), default=0)
            most = _MOST_OVER_WIDER * self._shape[wider] if wider else seconds / self._scale
            self._shape[rows] = self._once[rows] = min(seconds / self._scale, most)
            return
        for width in self._once.keys() - {rows}:
            self._shape[width] = max(
                self._shape[width] * _FORGET, min(self._shape[width], self._unseen(width))
            )
        if rows in self._once:
            self._shape[rows] = min(self._once.pop(rows), seconds / self._scale)
            return
        # One step that shared the CPU with another program must not count in full.
        deviation = min(max(seconds / self.seconds(rows), 0.5), 2.0) - 1
        self._shape[rows] *= 1 + (_FOLLOW - _DRIFT) * deviation
        self._scale *= 1 + _DRIFT * deviation

    @property
    def wait_s(self) -> float:
        """How long the runner waits between two steps of which the second needs the tokens of the first. 0
        where it always does."""
        return self._gap_s + self._more_s

    def observe_wait(self, seconds: float) -> None:
        """Learn from the time between a step's result and the next launch."""
        if not self._gap_s:
            self._gap_s = seconds
        self._gap_s += _FOLLOW * (min(seconds, 2 * self._gap_s) - self._gap_s)

    def observe_pause(self, seconds: float) -> None:
        """Learn from the whole time between two such steps, which is longer: results come late.

        A wait of twice that to the next launch at most, or one slow step could end all drafts for good.
        """
        more_s = min(max(seconds - self._gap_s, 0.0), self._gap_s)
        self._more_s += _FOLLOW * (more_s - self._more_s)

    def has_samples(self) -> bool:
        """Whether any step was seen."""
        return bool(self._shape)

    def seconds(self, rows: int) -> float:
        """Estimate a step of `rows` tokens; 1.0 for a plain step while none was seen."""
        rows = self.padded(rows)
        if not self._shape:
            return 1 + _UNSEEN_SLOPE * (rows - 1)
        if rows in self._shape:
            return self._scale * self._shape[rows]
        below = max((seen for seen in self._shape if seen < rows), default=0)
        above = min((seen for seen in self._shape if seen > rows), default=0)
        if not below:
            return self._scale * self._shape[above] * self._unseen(rows) / self._unseen(above)
        if not above:
            return self._scale * self._shape[below] * self._unseen(rows) / self._unseen(below)
        low = self._shape[below]
        high = self._shape[above]
        part = (rows - below) / (above - below)
        return self._scale * (low + max(0.0, high - low) * part)

    def padded(self, rows: int) -> int:
        """Rows with those of padding."""
        place = bisect_left(self._widths, rows)
        if place < len(self._widths):
            return self._widths[place]
        return rows

    def narrower(self, rows: int) -> int:
        """Most rows of a step that is padded to fewer than one of `rows`."""
        place = bisect_left(self._widths, rows)
        if 0 < place <= len(self._widths):
            return self._widths[place - 1]
        return rows - 1

    def _unseen(self, rows: int) -> float:
        return 1 + _UNSEEN_SLOPE * (rows - 1)
