"""Adapts the number of threads while other programs use the cores.

llama.cpp's threads wait for each other at every operation: one core lost to another program makes the others
spin, and a step takes several times as long. One thread fewer is then faster. Now and then the thread is tried
again. It stays if steps are not slower with it, even if a token is as fast without: prompts need all threads.
"""

import statistics
from collections import deque

from localchat.units import counted

_SLOW = 2.0
"""A step is slow at this many times the best, in proportion to the threads."""
_WINDOW = 16
"""Steps examined before the threads are changed. Three in four must be slow to give up one."""
_MIN_SLOW_S = 0.4
"""Time of slow steps after which a thread is given up. A screen that draws a dialog takes a core for less."""
_MAX_ROWS = 8
"""Widest step to compare. Wider steps are prompts, whose times vary too much."""
_TRIAL_SLOWER = 1.15
"""A trial fails if steps take this many times as long with the added thread."""
_TRIAL_STEPS = 4
"""Slower steps at the start of a trial that end it."""
_TRIAL_PAUSE = 20
"""Time of steps after a trial that failed, as a multiple of the trial's."""
_MIN_PAUSE_S = 2.0
"""Least time of steps before a thread is tried again."""
_MAX_PAUSE_S = 60.0
"""Time after which it is tried again in any case. Most of it may have been idle."""
_RECOVERED_S = 600.0
"""Time with all threads after which slowness is reported again."""
_WORSE = 2.0
"""Factor by which slowness must grow to be reported again."""


class ThreadWatch:
    """Chooses the number of threads from the times of the steps. Independent of llama.cpp. Single thread."""

    def __init__(self, threads: int) -> None:
        self.most = self.threads = max(1, threads)
        self._best_s: dict[tuple[int, int], float] = {}
        """Shortest step of each kind with any number of threads."""
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        """Times of the last steps, as multiples of the best."""
        self._slow_s = 0.0
        """Time of the slow steps so far. 0: most steps are not slow."""
        self._usual = 0.0
        """Median of them with the threads before a trial. 0: there is no trial."""
        self._pause_s = _MIN_PAUSE_S
        self._changed_s = 0.0
        self._computed_s = 0.0
        """Time of steps since the threads were changed."""
        self._slow_times = 0.0
        """Steps as a multiple of the best when a thread was last given up."""
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
        kind = rows, max(cells, 256).bit_length()
        self._best_s[kind] = best_s = min(self._best_s.get(kind, elapsed_s), elapsed_s)
        self._recent.append(elapsed_s / best_s)
        self._computed_s += elapsed_s
        if self._usual:
            return self._judge_trial(now_s) or self._recovered(now_s)
        if len(self._recent) == _WINDOW:
            if self.threads > 1 and self._is_slow(elapsed_s):
                self._reduce(now_s)
                return ""
            waited_s = now_s - self._changed_s
            is_due = self._computed_s > self._pause_s or waited_s > _MAX_PAUSE_S
            if self.threads < self.most and is_due:
                self._usual = statistics.median(self._recent)
                self._change(1, now_s)
        return self._recovered(now_s)

    def _is_slow(self, elapsed_s: float) -> bool:
        """Return whether most steps have been slow for long enough, the last one included.

        Fewer threads may take longer in proportion."""
        limit = _SLOW * self.most / self.threads
        slow = sum(times > limit for times in self._recent)
        if slow * 4 < _WINDOW * 3:
            self._slow_s = 0.0
            return False
        steps = 1
        if not self._slow_s:
            # The slow steps before this one took about as long.
            steps = slow
        self._slow_s += steps * elapsed_s
        return self._slow_s >= _MIN_SLOW_S

    def _judge_trial(self, now_s: float) -> str:
        """End the trial of another thread, once enough steps have shown its effect.

        Return a sentence if it failed: the cores are busy for longer than a moment.
        """
        seen = len(self._recent)
        limit = _TRIAL_SLOWER * self._usual
        if seen == _WINDOW and statistics.median(self._recent) <= limit:
            self._usual = 0.0
            self._pause_s = _MIN_PAUSE_S
        elif seen == _WINDOW or (seen == _TRIAL_STEPS and min(self._recent) > limit):
            self._pause_s = max(_TRIAL_PAUSE * self._computed_s, _MIN_PAUSE_S)
            self._usual = 0.0
            self._change(-1, now_s)
            return self._report()
        return ""

    def _reduce(self, now_s: float) -> None:
        self._slow_times = statistics.median(self._recent) * self.threads / self.most
        self._change(-1, now_s)

    def _report(self) -> str:
        if self._slow_times < _WORSE * self._reported_times:
            return ""
        self._reported_times = self._slow_times
        return (
            "Slower than usual: other programs are using the CPU. "
            f"Computing with {counted(self.threads, 'thread')} now."
        )

    def _recovered(self, now_s: float) -> str:
        """Return a notice once all threads have worked for long after a reported slowness."""
        if not self._reported_times or self.threads < self.most or self._usual:
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
        self._computed_s = 0.0
        self._slow_s = 0.0
        self._recent.clear()
