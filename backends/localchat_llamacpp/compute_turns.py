"""Turns of the steps and the encoder, which compute on the same cores.

Threads of llama.cpp wait for each other by spinning. If two graphs ran at once on all cores, each would wait
for threads that the other displaces, and both would be many times slower. So they alternate: a step, then one
part of the encoder's graph.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class ComputeTurns:
    """Lets two threads alternate. Neither waits if the other computes nothing."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._encoding = False
        self._step_waits = False
        self._stepping = False
        self._encoder_waits = False
        self._encoder_next = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Compute a step. Waits for one part of the encoder's graph at most."""
        with self._changed:
            self._step_waits = True
            self._changed.wait_for(lambda: not (self._encoding or self._encoder_next))
            self._step_waits = False
            self._stepping = True
        try:
            yield
        finally:
            with self._changed:
                self._stepping = False
                # Without this, the next step would begin before the encoder's thread wakes up.
                self._encoder_next = self._encoder_waits
                self._changed.notify_all()

    def begin_encoding(self) -> None:
        """Wait for the turn of the encoder."""
        with self._changed:
            self._encoder_waits = True
            self._changed.wait_for(
                lambda: self._encoder_next or not (self._stepping or self._step_waits)
            )
            self._encoder_waits = self._encoder_next = False
            self._encoding = True

    def end_encoding(self) -> None:
        """End the turn of the encoder."""
        with self._changed:
            self._encoding = False
            self._changed.notify_all()
