"""Holds the engine of a session: opens it in a thread, and replaces it."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from localchat.errors import LocalchatError
from localchat.notice_cause import notice_cause

if TYPE_CHECKING:
    from localchat.engine.events import EngineStats
    from localchat.engine.interface import Engine

Notify = Callable[[str], None]
OpenEngine = Callable[[Notify], "Engine"]
"""Opens an engine, which passes sentences for the user to the callable, from any thread."""


class EngineHolder:
    """Holds one engine at a time.

    Call `open` and `close` from one thread. Call `engine` from the event loop, even before the first `open`.
    Sentences of an engine are buffered until `listen` sets a listener.
    """

    def __init__(self) -> None:
        self._future: Future[Engine] = Future()
        self._opened = False
        self.reopens = True
        """Whether `open` may replace the engine."""
        self._pending: deque[str] = deque(maxlen=100)
        self._listener: Notify | None = None
        self._causes: set[str] = set()
        """Causes of the sentences that this engine has sent."""
        self._lock = threading.Lock()

    @classmethod
    def holding(cls, engine: "Engine") -> "EngineHolder":
        """Return a holder of an engine that is already open, and that the caller closes."""
        holder = cls()
        holder._future.set_result(engine)
        holder._opened = True
        holder.reopens = False
        return holder

    def open(self, open_engine: OpenEngine) -> None:
        """Start to open an engine. The previous one is closed first, so that memory never holds both."""
        previous: Future[Engine] | None = None
        if self._opened:
            previous = self._future
            self._future = Future()
        self._opened = True
        self._causes.clear()
        arguments = (open_engine, previous, self._future)
        threading.Thread(target=self._run, args=arguments, name="open-engine", daemon=True).start()

    def _run(
        self, open_engine: OpenEngine, previous: "Future[Engine] | None", future: "Future[Engine]"
    ) -> None:
        _close(previous)
        try:
            future.set_result(open_engine(self._notify))
        except BaseException as problem:  # noqa: BLE001 - raised by `engine`
            future.set_exception(problem)

    async def engine(self) -> "Engine":
        """Return the engine once it is open. Raises LocalchatError."""
        return await asyncio.shield(asyncio.wrap_future(self._future))

    async def stats(self) -> "EngineStats | None":
        """Return the engine's own metrics. None if it has exited."""
        try:
            engine = await self.engine()
            return await asyncio.to_thread(engine.stats)
        except LocalchatError:
            return None  # The next question starts another engine.

    def listen(self, listener: Notify) -> None:
        """Pass sentences to `listener` from threads of the engine, the buffered ones at once."""
        with self._lock:
            self._listener = listener
            buffered = list(self._pending)
            self._pending.clear()
        for sentence in buffered:
            listener(sentence)

    def _notify(self, sentence: str) -> None:
        """Forward a sentence if it is the first with its cause."""
        with self._lock:
            cause = notice_cause(sentence)
            if cause in self._causes:
                return
            self._causes.add(cause)
            listener = self._listener
            if listener is None:
                self._pending.append(sentence)
        if listener is not None:
            listener(sentence)

    def close(self) -> None:
        """Close the engine. Waits for an engine that is still being opened."""
        if self._opened:
            _close(self._future)
        self._opened = False


def _close(future: "Future[Engine] | None") -> None:
    if future is not None and future.exception() is None:
        future.result().close()
