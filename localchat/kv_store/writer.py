"""Runs tasks in order, in one thread of the lowest priority."""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

_NICE = 19


class _Task(NamedTuple):
    run: Callable[[], None]
    size_bytes: int


class Writer:
    """Runs background tasks. Thread-safe."""

    def __init__(self) -> None:
        self._tasks: deque[_Task] = deque()
        self._state = threading.Condition()
        self._busy = False
        """A thread runs a task."""
        self._draining = False
        """The thread that drains runs the tasks."""
        self._pending_bytes = 0
        self._thread: threading.Thread | None = None

    @property
    def pending_bytes(self) -> int:
        """Bytes that wait in memory to be written."""
        return self._pending_bytes

    def put(self, task: Callable[[], None], size_bytes: int) -> None:
        """Queue a task, which must not raise."""
        with self._state:
            self._tasks.append(_Task(task, size_bytes))
            self._pending_bytes += size_bytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kv-writer", daemon=True)
                self._thread.start()
            self._state.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Run the tasks in this thread until all are done. Return False if some remain after the timeout.

        On a busy machine, the thread of the lowest priority would not finish in time.
        """
        end_s = time.monotonic() + timeout_s
        with self._state:
            self._draining = True
        while time.monotonic() < end_s and self._run_next(end_s - time.monotonic()):
            pass
        with self._state:
            self._draining = False
            self._state.notify_all()
            return self._state.wait_for(self._is_done, max(0.0, end_s - time.monotonic()))

    def _is_done(self) -> bool:
        return not self._tasks and not self._busy

    def _run_next(self, timeout_s: float) -> bool:
        """Run a task once the other thread has finished its own. Return False if none is left."""
        with self._state:
            if not self._state.wait_for(lambda: not self._busy, timeout_s) or not self._tasks:
                return False
            task = self._start_next()
        self._finish(task)
        return True

    def _start_next(self) -> _Task:
        self._busy = True
        return self._tasks.popleft()

    def _finish(self, task: _Task) -> None:
        try:
            task.run()
        finally:
            with self._state:
                self._busy = False
                self._pending_bytes -= task.size_bytes
                self._state.notify_all()

    def _run(self) -> None:
        # On other systems, the priority would apply to the whole process.
        if sys.platform == "linux":
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while True:
            with self._state:
                self._state.wait_for(self._may_start)
                task = self._start_next()
            self._finish(task)

    def _may_start(self) -> bool:
        return bool(self._tasks) and not self._busy and not self._draining
