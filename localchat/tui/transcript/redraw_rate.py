"""Rate of redraws of a growing transcript.

Twenty per second, unless a redraw is expensive (it may take a fifth of the time at most) or the terminal is
slow: the echo of a typed letter waits for all bytes sent before it. A slow terminal gets few redraws, and the
end of the text moves up by many rows at once. A module of its own so that tests can run it on any clock.
"""

from typing import Final

FAST_S: Final = 0.05
SLOW_S: Final = 0.4
_COST_FACTOR: Final = 4.0
_SLOW_FOR_S: Final = 10.0
_MAX_SLOW_FOR_S: Final = 320.0


class RedrawRate:
    """Interval between redraws. All times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._cost_s = 0.0
        self._slow_until = float("-inf")
        self._slow_for_s = _SLOW_FOR_S

    def drew(self, cost_s: float) -> None:
        """Record how long a redraw took."""
        self._cost_s = cost_s

    def blocked(self, now_s: float) -> None:
        """Record that the last frame was still unread when the next one was due."""
        # Each time it turns out slow again, it counts as slow for longer.
        if now_s >= self._slow_until:
            self._slow_for_s = min(2 * self._slow_for_s, _MAX_SLOW_FOR_S)
        self._slow_until = now_s + self._slow_for_s

    def slow(self, now_s: float) -> bool:
        return now_s < self._slow_until

    def wait_s(self, now_s: float) -> float:
        """Seconds from the last redraw to the next one."""
        base = FAST_S
        if self.slow(now_s):
            base = SLOW_S
        return max(base, _COST_FACTOR * self._cost_s)
