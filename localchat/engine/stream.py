"""Stream of a request's events, for a thread or an event loop."""

import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from localchat.engine.events import Done, Event
from localchat.errors import EngineClosed, LocalchatError

if TYPE_CHECKING:
    import asyncio

SIGNAL_POLL_S = 0.1
"""Interval in seconds at which a waiting thread checks for signals.

Python runs signal handlers between two instructions. A Ctrl+C that arrives just before a wait would otherwise
be handled only after the wait.
"""
_FINAL = (LocalchatError, Done)


class Stream:
    """Events of one request. Iterate from one place, in a thread or with `async for`.

    The stream ends after `Done` or at `end()`. A failure is raised from the iteration. `close()` cancels the
    request, is idempotent, and may be called from any thread. Leaving the `with` block closes the stream.
    Events after a close are dropped.
    """

    def __init__(
        self,
        cancel: Callable[[], None],
        read_in: "Callable[[asyncio.AbstractEventLoop], None] | None" = None,
    ) -> None:
        """cancel: called at most once, by `close`. read_in: told which event loop waits for events, so that the
        events can be read there."""
        self._cancel = cancel
        self._read_in = read_in
        self._items: deque[Event | LocalchatError] = deque()
        self._lock = threading.Condition()
        self._waiter: asyncio.Future[None] | None = None
        """Future of a consumer in an event loop that has read all events."""
        self._take: Callable[[list[Event]], bool] | None = None
        """Function of that consumer, which takes events without waking it."""
        self._take_thread = 0
        self._ended = False
        self._closed = False

    def put(self, *items: Event | LocalchatError) -> None:
        """Add events, or the failure that ends the stream. Thread-safe."""
        put_together([(self, items)])

    def _add(self, items: Sequence[Event | LocalchatError]) -> "asyncio.Future[None] | None":
        """Add items. Return the future of a waiting consumer in an event loop."""
        with self._lock:
            if self._ended or self._closed or self._taken(items):
                return None
            for item in items:
                self._items.append(item)
                if isinstance(item, _FINAL):
                    self._ended = True
                    break
            return self._take_waiter()

    def _taken(self, items: "Sequence[Event | LocalchatError]") -> bool:
        """Offer items to the waiting consumer's function. Call with the lock held."""
        if (
            self._take is None
            or self._items
            or not items
            or self._take_thread != threading.get_ident()
            or isinstance(items[-1], _FINAL)
        ):
            return False
        try:
            return self._take(cast("list[Event]", items))  # failures are final
        except Exception as error:  # noqa: BLE001 - the consumer raises it
            waiter = self._take_waiter()
            if waiter is not None and not waiter.done():
                waiter.set_exception(error)
            return True

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            had_ended = self._ended
            waiter = self._take_waiter()
        _wake([waiter] if waiter is not None else [])
        if not had_ended:
            self._cancel()

    @property
    def ended(self) -> bool:
        """Whether all events have arrived, even if some are unread."""
        return self._ended or self._closed

    def _take_waiter(self) -> "asyncio.Future[None] | None":
        """Wake a consumer in a thread, or return the future of one in an event loop.

        Call with the lock held.
        """
        waiter = self._waiter
        self._waiter = self._take = None
        if waiter is None:
            self._lock.notify_all()
        return waiter

    def _next_event(self) -> Event | None:
        """Return the next event, or None while the queue is empty. Call with the lock held."""
        if self._items:
            item = self._items.popleft()
            if isinstance(item, LocalchatError):
                raise item
            return item
        if self._closed:
            raise EngineClosed("the request was cancelled")
        return None

    @property
    def _drained(self) -> bool:
        return self._ended and not self._items

    def __iter__(self) -> Iterator[Event]:
        while True:
            with self._lock:
                event = None
                while event is None:
                    if self._drained:
                        return
                    event = self._next_event()
                    if event is None:
                        self._lock.wait(SIGNAL_POLL_S)
            yield event

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for batch in self.batches():
            for event in batch:
                yield event

    async def batches(self) -> AsyncIterator[list[Event]]:
        """Yield all events so far, whenever the consumer asks for more.

        A consumer that pauses between batches is woken once per batch, not once per event.
        """
        while batch := await self.batch():
            yield batch

    async def batch(self, take: Callable[[list[Event]], bool] | None = None) -> list[Event]:
        """Return all events so far, at least one. The list is empty at the end of the stream.

        take: called with events that arrive in the thread of this event loop, instead of waking the consumer.
        Returns False for events that it leaves to the consumer. It must neither block nor close the stream.
        """
        while True:
            with self._lock:
                if self._drained:
                    return []
                if batch := self._next_batch():
                    return batch
                # The import takes 25 ms, which one-shot commands avoid by reading in a thread.
                import asyncio

                loop = asyncio.get_running_loop()
                waiter = self._waiter = loop.create_future()
                self._take = take
                self._take_thread = threading.get_ident()
            if self._read_in is not None:
                self._read_in(loop)
            await waiter

    def _next_batch(self) -> list[Event]:
        """Return the events before a failure, or raise a failure that is first. Call with the lock held."""
        batch: list[Event] = []
        while self._items and not (batch and isinstance(self._items[0], LocalchatError)):
            event = self._next_event()
            assert event is not None
            batch.append(event)
        if not batch:
            # This raises if the stream is closed.
            self._next_event()
        return batch

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def put_together(batches: Iterable[tuple[Stream, Sequence[Event | LocalchatError]]]) -> None:
    """Add items to several streams, and wake each event loop once. Thread-safe.

    A wake-up is a system call.
    """
    waiters = [stream._add(items) for stream, items in batches]
    _wake([waiter for waiter in waiters if waiter is not None])


def _wake(waiters: "Sequence[asyncio.Future[None]]") -> None:
    if not waiters:
        return
    # A future exists, so that this import is free.
    import asyncio

    running = asyncio._get_running_loop()
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for waiter in waiters:
        by_loop.setdefault(waiter.get_loop(), []).append(waiter)
    for loop, futures in by_loop.items():
        if loop is running:
            _resolve(futures)
            continue
        # The consumer's event loop may be closed.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_resolve, futures)


def _resolve(waiters: "Sequence[asyncio.Future[None]]") -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
