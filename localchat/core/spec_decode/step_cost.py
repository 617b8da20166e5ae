"""Cost of a step by its number of tokens, learned from the steps themselves."""

from bisect import bisect_left
from collections.abc import Sequence

from localchat.core.scheduler.step_builder import ScheduledStep

_FOLLOW = 0.2
_DRIFT = 0.1
_MAX_OVER_WIDER = 1.1
_MAX_OVER_SECOND = 2.0
"""Limit on the first step of a width, as a multiple of the second. The rest is another program's load."""
_FORGET = 0.99
"""Factor for the cost of a width observed once, with each step of another width."""


class CostModel:
    """Seconds of a step by its rows (tokens computed). One for each runner, shared by its sequences.

    An estimate is a common scale times a shape. Longer contexts and other work on the machine slow down steps
    of all widths, so every step moves the scale, and its own width moves the shape. Widths that were never
    seen are interpolated. Beyond the widest, each row is assumed to cost as much as the runner says. The first
    such step corrects that. If that step was slow by chance, no second one would follow. So its cost decays
    until there is a second one. Then their mean counts, because other widths have means too: on a busy machine,
    the shorter of the two makes drafts look cheap.
    """

    def __init__(self, widths: Sequence[int] = (), row_cost: float = 0.15) -> None:
        """`widths`: row counts to which steps are padded, ascending. Empty: steps are not padded.

        `row_cost`: assumed cost of each further row, over that of a step of one row.
        """
        self._widths = widths
        self._row_cost = row_cost
        self._gap_s = 0.0
        self._more_s = 0.0
        self._scale = 0.0
        self._shape: dict[int, float] = {}
        self._once: dict[int, float] = {}
        """Relative cost of each width that was observed only once."""

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
            relative = seconds / self._scale
            wider = min((width for width in self._shape if width > rows), default=0)
            if wider:
                # A step that was slow by chance must not make this width look worse than a wider one.
                relative = min(relative, _MAX_OVER_WIDER * self._shape[wider])
            self._shape[rows] = relative
            self._once[rows] = relative
            return
        for width in self._once.keys() - {rows}:
            self._shape[width] = max(
                self._shape[width] * _FORGET, min(self._shape[width], self._unseen(width))
            )
        if rows in self._once:
            relative = seconds / self._scale
            first = min(self._once.pop(rows), _MAX_OVER_SECOND * relative)
            self._shape[rows] = (first + relative) / 2
            return
        # One step that shared the CPU with another program must not count in full.
        deviation = min(max(seconds / self.seconds(rows), 0.5), 2.0) - 1
        self._shape[rows] *= 1 + (_FOLLOW - _DRIFT) * deviation
        self._scale *= 1 + _DRIFT * deviation

    @property
    def wait_s(self) -> float:
        """Pause of the runner before a step that needs the tokens of the previous one.

        0 if every step needs them.
        """
        return self._gap_s + self._more_s

    def observe_wait(self, seconds: float) -> None:
        """Learn from the time between the result of a step and the next launch."""
        if not self._gap_s:
            self._gap_s = seconds
        self._gap_s += _FOLLOW * (min(seconds, 2 * self._gap_s) - self._gap_s)

    def observe_pause(self, seconds: float) -> None:
        """Learn from the whole pause between two such steps, which includes the late result.

        Counts at most twice the time to the next launch. Otherwise one slow step could end all drafts for good.
        """
        more_s = min(max(seconds - self._gap_s, 0.0), self._gap_s)
        self._more_s += _FOLLOW * (more_s - self._more_s)

    def has_samples(self) -> bool:
        """Return whether any step was observed."""
        return bool(self._shape)

    def seconds(self, rows: int) -> float:
        """Estimate a step of `rows` tokens. A plain step takes 1.0 until one was observed."""
        rows = self.padded(rows)
        if not self._shape:
            return self._unseen(rows)
        if rows in self._shape:
            return self._scale * self._shape[rows]
        below = max((width for width in self._shape if width < rows), default=0)
        above = min((width for width in self._shape if width > rows), default=0)
        if not below or not above:
            nearest = below or above
            return self._scale * self._shape[nearest] * self._unseen(rows) / self._unseen(nearest)
        low = self._shape[below]
        high = self._shape[above]
        part = (rows - below) / (above - below)
        return self._scale * (low + max(0.0, high - low) * part)

    def padded(self, rows: int) -> int:
        """Return the width to which a step of `rows` is padded."""
        index = bisect_left(self._widths, rows)
        if index < len(self._widths):
            return self._widths[index]
        return rows

    def _unseen(self, rows: int) -> float:
        return 1 + self._row_cost * (rows - 1)


class PauseClock:
    """Measures the pauses before steps that need the tokens of the previous step."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._returned_s = 0.0
        """Time at which the last step returned, until the next launch. Otherwise 0."""
        self._followed_s = 0.0
        """Time at which the previous step returned, if only one step is in flight. Otherwise 0."""

    def reset(self) -> None:
        """Forget the last result, because nothing was in flight."""
        self._returned_s = 0.0

    def step_returned(self, step: ScheduledStep, elapsed_s: float, now_s: float) -> None:
        """Record a result. `elapsed_s`: time that the step took on the device, if known."""
        if self._followed_s and step.drafts and elapsed_s:
            self._cost.observe_pause(now_s - self._followed_s - elapsed_s)
        self._followed_s = 0.0
        self._returned_s = now_s

    def step_launched(self, step: ScheduledStep, now_s: float, *, only: bool) -> None:
        """Record a launch. `only`: no other step is in flight."""
        if self._returned_s and step.is_decode:
            # The planner counts the time for drafting separately.
            returned_s = self._returned_s + step.drafting_s
            self._cost.observe_wait(now_s - returned_s)
            if only:
                self._followed_s = returned_s
        self._returned_s = 0.0
