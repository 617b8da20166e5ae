"""Runs tasks in order, in one thread of the lowest priority."""

import os
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

_NICE = 19


class Writer:
    """Runs background tasks. Thread-safe."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], int]] = queue.SimpleQueue()
        self._state = threading.Condition()
        self._waiting = 0
        self._pending_bytes = 0
        self._thread: threading.Thread | None = None

    @property
    def pending_bytes(self) -> int:
        """Bytes that wait in memory to be written."""
        return self._pending_bytes

    def put(self, task: Callable[[], None], size_bytes: int) -> None:
        """Queue a task, which must not raise."""
        with self._state:
            self._waiting += 1
            self._pending_bytes += size_bytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kv-writer", daemon=True)
                self._thread.start()
        self._tasks.put((task, size_bytes))

    def drain(self, timeout_s: float) -> bool:
        """Wait until all tasks ran. Return False if some remain after the timeout."""
        with self._state:
            return self._state.wait_for(lambda: not self._waiting, timeout_s)

    def _run(self) -> None:
        # On other systems, the priority would apply to the whole process.
        if sys.platform == "linux":
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while True:
            task, size_bytes = self._tasks.get()
            try:
                task()
            finally:
                with self._state:
                    self._waiting -= 1
                    self._pending_bytes -= size_bytes
                    self._state.notify_all()
