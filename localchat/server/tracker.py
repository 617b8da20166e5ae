"""Tracks the requests in progress. Used on the event loop only."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Protocol

from localchat.engine.events import Done, Usage
from localchat.server.errors import ApiError, unavailable


class Closable(Protocol):
    """Work of a request: a stream of an engine, or calls of tools."""

    def close(self) -> None:
        """Cancel the work. Idempotent."""
        ...


@dataclass(eq=False, slots=True)
class TrackedRequest:
    """A request to an engine, with its numbers for log and metrics. Contains no text of it.

    Size: the log line of a request shows each field.
    """

    id: str
    model: str = ""
    user: str = ""
    """The client's user agent."""
    guided: bool = False
    """A grammar, a schema or a tool constrains the answer."""
    work: "asyncio.Task[object] | None" = None
    """Task that answers the request."""
    streams: list[Closable] = field(default_factory=list)
    abort_error: ApiError | None = None
    """Reason why the server ended the request."""
    client_left: bool = False
    cancels: int = 0
    """Number of times the server itself has cancelled `work`."""
    started: bool = False
    """True once an engine has started on the prompt."""
    answered: bool = False
    arrived_s: float = field(default_factory=time.perf_counter)
    load_s: float = 0.0
    """Time until the model accepted the request. `done` has the load as a whole."""
    first_token_s: float | None = None
    usage: Usage | None = None
    done: Done | None = None
    why_missed: str = ""
    """Reason why the prefix cache missed."""
    finish_reason: str = ""
    error: str = ""

    def attach(self, stream: Closable) -> None:
        """Own a stream: close it with the request, or at once if the request is over."""
        self.streams.append(stream)
        if self.abort_error is not None or self.client_left:
            stream.close()

    def abort(self, error: ApiError) -> None:
        """Cancel the streams of the request. The client gets this error."""
        if self.abort_error is None:
            self.abort_error = error
        if not self.streams:
            self.cancel_work()  # the task still waits for an engine
        self.close()

    def cancel_work(self) -> None:
        """Cancel the task that answers the request."""
        if self.work is not None:
            self.work.cancel()
            self.cancels += 1

    def close(self) -> None:
        """Cancel the streams of the request."""
        for stream in self.streams:
            stream.close()


class RequestTracker:
    """All requests in progress."""

    def __init__(self, max_waiting: int) -> None:
        """`max_waiting` limits the requests that no engine has started."""
        self._max_waiting = max_waiting
        self._requests: set[TrackedRequest] = set()
        self._stopping = False

    @property
    def waiting(self) -> int:
        """Number of requests that no engine has started."""
        return sum(not request.started for request in self._requests)

    @property
    def running(self) -> int:
        """Number of requests that an engine has started."""
        return sum(request.started for request in self._requests)

    def add(self, request: TrackedRequest) -> None:
        """Track a request. Raises ApiError if the queue is full or the server stops."""
        self.check_open()
        if self.waiting >= self._max_waiting:
            raise unavailable(
                f"{self.waiting} requests are already waiting; try again in a moment."
            )
        self._requests.add(request)

    def remove(self, request: TrackedRequest) -> None:
        """Close a request and stop tracking it."""
        request.close()
        self._requests.discard(request)

    def check_open(self) -> None:
        """Raise ApiError if the server stops."""
        if self._stopping:
            raise _server_stopping()

    def stop_accepting(self) -> None:
        """Reject new requests from now on, because the server stops."""
        self._stopping = True

    def abort_all(self) -> None:
        """End all requests with an error, because the server stops."""
        self.stop_accepting()
        for request in list(self._requests):
            request.abort(_server_stopping())


def _server_stopping() -> ApiError:
    return unavailable("The server is stopping.", "server_stopping", retry_s=5)
