"""The engine of the screen: opened in a thread once the first frame is drawn, changed in mid-conversation."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localchat.engine.interface import Engine

Say = Callable[[str], None]
OpenEngine = Callable[[Say], "Engine"]
"""Opens one engine; `say` gets sentences for the user, from any thread."""


class EngineHolder:
    """Holds one engine at a time. `open` and `close` are called from one thread, `engine` from the event
    loop; it may wait before the first `open`. What an engine says waits in `said` until `listen` names who
    hears it."""

    def __init__(self) -> None:
        self._future: Future[Engine] = Future()
        self._opened = False
        self._said: deque[str] = deque(maxlen=100)
        self._listener: Callable[[str], None] | None = None
        self._lock = threading.Lock()

    @classmethod
    def holding(cls, engine: "Engine") -> "EngineHolder":
        """A holder of an engine that is open already."""
        holder = cls()
        holder._future.set_result(engine)
        holder._opened = True
        return holder

    def open(self, open_engine: OpenEngine) -> None:
        """Begin to open; the engine before is closed first, so that both never need memory at once."""
        before, fresh = (self._future, Future["Engine"]()) if self._opened else (None, self._future)
        self._future, self._opened = fresh, True
        arguments = (open_engine, before, fresh)
        threading.Thread(target=self._run, args=arguments, name="open-engine", daemon=True).start()

    def _run(
        self, open_engine: OpenEngine, before: "Future[Engine] | None", fresh: "Future[Engine]"
    ) -> None:
        _close(before)
        try:
            fresh.set_result(open_engine(self._say))
        except BaseException as problem:  # noqa: BLE001 - it is raised where the engine is asked for
            fresh.set_exception(problem)

    async def engine(self) -> "Engine":
        """The engine, once it is there. Raises LocalchatError."""
        return await asyncio.shield(asyncio.wrap_future(self._future))

    def listen(self, hear: Callable[[str], None]) -> None:
        """Sentences go to `hear`, from threads of the engine; those that waited at once."""
        with self._lock:
            self._listener = hear
            waited = list(self._said)
            self._said.clear()
        for sentence in waited:
            hear(sentence)

    def _say(self, sentence: str) -> None:
        with self._lock:
            listener = self._listener
            if listener is None:
                self._said.append(sentence)
        if listener is not None:
            listener(sentence)

    def close(self) -> None:
        """Unload; waits for an engine that is still being opened."""
        if self._opened:
            _close(self._future)
        self._opened = False


def _close(future: "Future[Engine] | None") -> None:
    if future is not None and future.exception() is None:
        future.result().close()
