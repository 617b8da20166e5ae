"""Reads the frames of an engine process, in a thread or in the event loop that waits for their events."""

import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from localchat.engine.local.protocol import FrameBuffer, FromChild

if TYPE_CHECKING:
    import asyncio

_READ_BYTES = 1 << 16
_CHECK_S = 0.25
"""Interval at which the thread checks that the event loop reads. Unread frames at two checks end its turn."""


class FrameSource:
    """Reads frames from a pipe.

    A thread costs two context switches and two system calls per frame to hand its events to an event loop, as
    much as the rest of a server's work for a token. The loop of a waiting consumer therefore reads the pipe
    itself. The thread continues once no request is left, or if the loop is closed or blocked, for example by a
    call that waits for the engine.
    """

    def __init__(self, pipe: int, on_frame: Callable[[FromChild], None]) -> None:
        """pipe: file descriptor. on_frame: receives each frame, from one thread at a time."""
        os.set_blocking(pipe, False)
        self._pipe = pipe
        self._on_frame = on_frame
        self._frames: FrameBuffer[FromChild] = FrameBuffer(FromChild)
        self._lock = threading.Lock()
        """Lock held while frames are read and delivered, which keeps their order."""
        self._requested: asyncio.AbstractEventLoop | None = None
        self._reading: asyncio.AbstractEventLoop | None = None
        """Event loop that reads the frames."""
        self._turn_ended = threading.Event()
        self._reads = 0
        self._failure: Exception | None = None

    def run(self) -> None:
        """Read until the end of the pipe, in the thread of this source.

        Raises FrameError, OSError, and what `on_frame` raises.
        """
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        ended = False
        while not ended:
            poll.poll()
            ended = self._read()
            loop = self._requested
            if loop is not None and not ended:
                self._give_turn(loop, poll)
                if self._failure is not None:
                    raise self._failure

    def read_in(self, loop: "asyncio.AbstractEventLoop") -> None:
        """Let an event loop read from the next frame on. Thread-safe."""
        if self._reading is None:
            self._requested = loop

    def read_in_thread(self) -> None:
        """Let the thread read again. Thread-safe."""
        self._requested = None
        self._turn_ended.set()

    def _read(self) -> bool:
        """Read what is in the pipe and deliver its frames. Return True at its end."""
        with self._lock:
            self._reads += 1
            try:
                data = os.read(self._pipe, _READ_BYTES)
            except BlockingIOError:
                return False
            if not data:
                self._frames.end()
                return True
            for frame in self._frames.add(data):
                self._on_frame(frame)
            return False

    def _give_turn(self, loop: "asyncio.AbstractEventLoop", poll: select.poll) -> None:
        """Let an event loop read, and return when the thread must continue."""

        def start() -> None:
            if self._reading is loop:
                loop.add_reader(self._pipe, self._read_in_loop, loop)

        def stop() -> None:
            if self._reading is not loop:
                loop.remove_reader(self._pipe)

        self._turn_ended.clear()
        self._reading = loop
        # The loop may be closed.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(start)
            unread_since = -1
            while not self._turn_ended.wait(_CHECK_S) and not loop.is_closed():
                if not poll.poll(0):
                    unread_since = -1
                elif unread_since == self._reads:
                    break
                else:
                    unread_since = self._reads
        self._requested = self._reading = None
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(stop)

    def _read_in_loop(self, loop: "asyncio.AbstractEventLoop") -> None:
        try:
            ended = self._read()
        except Exception as error:  # noqa: BLE001 - the thread raises it
            self._failure = error
            ended = True
        if ended:
            # The thread finds the end of the pipe again, and waits for the process to exit.
            self._turn_ended.set()
        if self._turn_ended.is_set():
            loop.remove_reader(self._pipe)
