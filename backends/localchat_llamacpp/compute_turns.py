"""Turns of the steps and the encoder, which compute on the same cores.

Threads of llama.cpp wait for each other by spinning. If two graphs ran at once on all cores, each would wait
for threads that the other displaces, and both would be many times slower. So they take turns, and each gets
half of the time: after a part of the encoder's graph, steps run for as long as the part took.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_PAUSE_S = 0.02
"""Longest time between two steps of a running engine."""


class ComputeTurns:
    """Lets two threads alternate. Neither waits if the other computes nothing."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._encoding = False
        self._encoder_waits = False
        self._encoder_next = False
        """The next turn is the encoder's, even if a step waits."""
        self._stepping = False
        self._step_waits = False
        self._step_ended_s = float("-inf")
        self._part_began_s = 0.0
        self._owed_s = 0.0
        """Time that steps may take before the encoder's next turn."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Compute a step. Waits for one part of the encoder's graph at most."""
        with self._changed:
            self._step_waits = True
            self._changed.wait_for(lambda: not (self._encoding or self._encoder_next))
            self._step_waits = False
            self._stepping = True
        began_s = time.perf_counter()
        try:
            yield
        finally:
            with self._changed:
                self._stepping = False
                self._step_ended_s = time.perf_counter()
                self._owed_s -= self._step_ended_s - began_s
                self._encoder_next = self._encoder_waits and self._owed_s <= 0
                self._changed.notify_all()

    def begin_encoding(self) -> None:
        """Wait for the turn of the encoder."""
        with self._changed:
            self._encoder_waits = True
            while not (self._encoder_next or self._is_quiet()):
                self._changed.wait(_PAUSE_S)
            self._encoder_waits = self._encoder_next = False
            self._encoding = True
            self._part_began_s = time.perf_counter()

    def end_encoding(self) -> None:
        """End the turn of the encoder."""
        with self._changed:
            self._encoding = False
            self._owed_s = time.perf_counter() - self._part_began_s
            self._changed.notify_all()

    def _is_quiet(self) -> bool:
        """Whether no step runs, waits, or is about to follow another one."""
        if self._stepping or self._step_waits:
            return False
        return self._owed_s <= 0 or time.perf_counter() - self._step_ended_s >= _PAUSE_S
