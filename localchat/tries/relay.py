"""Relay: one stream of events out of several requests that a thread sends one after the other."""

import threading
from collections.abc import Callable

from localchat.engine.events import Accepted, Event
from localchat.engine.interface import Engine
from localchat.engine.request import GenerateRequest
from localchat.engine.stream import Stream
from localchat.errors import LocalchatError


class Relay:
    """Produces `stream` on a thread. Closing the stream cancels the request in flight."""

    def __init__(self, produce: Callable[[], None]) -> None:
        """`produce` sends requests with `generate`, and events with `send`."""
        self.stream = Stream(self._cancel)
        self._produce = produce
        self._request: Stream | None = None
        self._cancelled = threading.Event()
        self._accepted = False
        self._thread = threading.Thread(target=self._run, name="tries", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended, after the stream was closed."""
        self._thread.join(timeout_s)

    def generate(self, engine: Engine, request: GenerateRequest) -> Stream:
        """Send a request, and return its events. Called on the thread."""
        stream = engine.generate(request)
        self._request = stream
        # Look after the assignment: a cancel before it did not see this request.
        if self._cancelled.is_set():
            stream.close()
        return stream

    def send(self, *events: Event) -> None:
        """Add events to the stream. Only the first `Accepted` passes, because consumers see one request."""
        if self._accepted:
            events = tuple(event for event in events if not isinstance(event, Accepted))
        elif any(isinstance(event, Accepted) for event in events):
            self._accepted = True
        self.stream.put(*events)

    def _cancel(self) -> None:
        self._cancelled.set()
        if self._request is not None:
            self._request.close()

    def _run(self) -> None:
        try:
            self._produce()
        except LocalchatError as problem:
            self.stream.put(problem)
        except Exception as problem:  # noqa: BLE001 - the consumer would wait forever
            self.stream.put(LocalchatError(f"the answer failed: {problem!r}"))
        else:
            self.stream.end()
