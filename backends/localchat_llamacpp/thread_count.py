"""Adapts the number of threads while other programs use the cores.

llama.cpp's threads wait for each other at every operation: one core lost to another program makes the others
spin, and a step takes several times as long. One thread fewer is then faster.
"""

import statistics
from collections import deque

from localchat.units import counted

_SLOW = 2.0
"""A step is slow at this many times the best."""
_WINDOW = 16
"""Steps examined before giving up a thread. Three in four must be slow."""
_MAX_ROWS = 8
"""Widest step to compare. Wider steps are prompts, whose times vary too much."""
_TRIAL_STEPS = 4
"""Slow steps at the start of a trial that end it."""
_TRIAL_PAUSE = 20
"""Pause after a trial that failed, as a multiple of its duration."""
_MIN_PAUSE_S = 2.0
_MAX_PAUSE_S = 60.0
"""Limits of the pause before a thread is tried again. A compilation on the same cores ends at some time."""
_RECOVERED_S = 600.0
"""Time with all threads after which slowness is reported again."""
_WORSE = 2.0
"""Factor by which slowness must grow to be reported again."""


class ThreadWatch:
    """Chooses the number of threads from the times of the steps. Independent of llama.cpp. Single thread."""

    def __init__(self, threads: int) -> None:
        self.most = self.threads = max(1, threads)
        self._best_s: dict[tuple[int, int], float] = {}
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._slow = 0
        self._pause_s = _MIN_PAUSE_S
        self._changed_s = 0.0
        self._trying = False
        self._reported_times = 0.0
        self._whole_since_s: float | None = None

    def step(self, rows: int, cells: int, elapsed_s: float, now_s: float) -> str:
        """Record the time of a step, adapt `threads`, and return a sentence for the user.

        Empty: there is nothing new to report. Compares steps of the same rows and about the same cells, because
        a long conversation is slower by itself. rows: tokens computed. cells: KV that the step read. now_s: a
        monotonic clock.
        """
        if rows > _MAX_ROWS or self.most == 1:
            return ""
        self._record(elapsed_s / self._expected(rows, cells, elapsed_s))
        failed = self._trying and len(self._recent) == self._slow == _TRIAL_STEPS
        seen_enough = len(self._recent) == _WINDOW
        slow = failed or (seen_enough and self._slow * 4 >= _WINDOW * 3)
        if slow and self.threads > 1:
            return self._reduce(now_s)
        if seen_enough and self._trying and not slow:
            self._trying = False
            self._pause_s = _MIN_PAUSE_S
        paused = seen_enough and now_s - self._changed_s > self._pause_s
        if self.threads < self.most and paused:
            self._trying = True
            self._change(1, now_s)
            return ""
        return self._recovered(now_s)

    def _record(self, ratio: float) -> None:
        if len(self._recent) == _WINDOW:
            self._slow -= self._recent[0] > _SLOW
        self._recent.append(ratio)
        self._slow += ratio > _SLOW

    def _expected(self, rows: int, cells: int, elapsed_s: float) -> float:
        """Return the seconds of a good step with the present threads.

        All thread counts share the best times. Fewer threads are slower at most in proportion, and that must
        not count as a busy machine.
        """
        kind = rows, max(cells, 256).bit_length()
        share = self.threads / self.most
        best_s = self._best_s.get(kind)
        if best_s is None or elapsed_s * share < best_s:
            self._best_s[kind] = best_s = elapsed_s * share
        return best_s / share

    def _reduce(self, now_s: float) -> str:
        if self._trying:
            lost_s = now_s - self._changed_s
            self._pause_s = min(max(_TRIAL_PAUSE * lost_s, _MIN_PAUSE_S), _MAX_PAUSE_S)
            self._trying = False
        times = statistics.median(self._recent)
        self._change(-1, now_s)
        if times < _WORSE * self._reported_times:
            return ""
        self._reported_times = times
        return (
            "Slower than usual: other programs are using the CPU. "
            f"Computing with {counted(self.threads, 'thread')} now."
        )

    def _recovered(self, now_s: float) -> str:
        """Return a notice once all threads have worked for long after a reported slowness."""
        if not self._reported_times or self.threads < self.most or self._trying:
            self._whole_since_s = None
        elif self._whole_since_s is None:
            self._whole_since_s = now_s
        elif now_s - self._whole_since_s > _RECOVERED_S:
            self._reported_times = 0.0
            self._whole_since_s = None
            return f"Back to the usual speed: computing with {counted(self.threads, 'thread')}."
        return ""

    def _change(self, difference: int, now_s: float) -> None:
        self.threads += difference
        self._changed_s = now_s
        self._recent.clear()
        self._slow = 0
