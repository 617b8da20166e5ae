"""How often a transcript that grows is drawn again.

Twenty times a second, unless a drawing is dear (then it may take a fifth of the time at most) or the terminal
is slow: bytes that wait in front of a typed letter are what its echo waits for. A slow terminal gets few
drawings, and the end of the text moves up by many rows at once.
"""

from typing import Final

FAST_S: Final = 0.05
SLOW_S: Final = 0.4
_DEAR: Final = 4.0
_STAY_SLOW_S: Final = 10.0
_STAY_SLOW_MOST_S: Final = 320.0


class RedrawRate:
    """Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._cost_s = 0.0
        self._slow_until = float("-inf")
        self._stays_s = _STAY_SLOW_S

    def drew(self, cost_s: float) -> None:
        """A drawing took this long."""
        self._cost_s = cost_s

    def blocked(self, now_s: float) -> None:
        """The terminal had not read an earlier drawing when the next was due."""
        if (
            now_s >= self._slow_until
        ):  # each time that it turns out slow again it is believed for longer
            self._stays_s = min(2 * self._stays_s, _STAY_SLOW_MOST_S)
        self._slow_until = now_s + self._stays_s

    def slow(self, now_s: float) -> bool:
        return now_s < self._slow_until

    def wait_s(self, now_s: float) -> float:
        """How long the next drawing waits after the last."""
        base = SLOW_S if self.slow(now_s) else FAST_S
        return max(base, _DEAR * self._cost_s)
