"""Requests under way: who waits, who runs, what each has cost so far. One thread, the event loop's."""

import asyncio
import time
from dataclasses import dataclass, field

from localchat.engine.events import Done, Usage
from localchat.engine.stream import Stream
from localchat.server.errors import ApiError, unavailable


@dataclass(eq=False, slots=True)
class TrackedRequest:
    """One request to an engine. Everything that the log and the figures say of it; never a word of text.

    work: what answers it. why: what ended it from the server's side. begun: an engine has started on the
    prompt. guided: a grammar, a schema or a tool binds it. user: what the client calls itself.
    """

    id: str
    model: str = ""
    user: str = ""
    guided: bool = False
    work: "asyncio.Future[None] | None" = None
    streams: list[Stream] = field(default_factory=list)
    why: ApiError | None = None
    gone: bool = False
    begun: bool = False
    answered: bool = False
    arrived_s: float = field(default_factory=time.perf_counter)
    first_s: float | None = None
    usage: Usage | None = None
    done: Done | None = None
    finish: str = ""
    error: str = ""

    def attach(self, stream: Stream) -> None:
        """Take charge of a stream: it is closed with the flight, at once where that has ended already."""
        self.streams.append(stream)
        if self.why is not None or self.gone:
            stream.close()

    def end(self, why: ApiError) -> None:
        """End it from the server's side: its streams are cancelled, its reader is told why."""
        if self.why is None:
            self.why = why
        if not self.streams and self.work is not None:
            self.work.cancel()  # it waits for an engine yet
        self.close()

    def close(self) -> None:
        """Cancel what still runs."""
        for stream in self.streams:
            stream.close()


class RequestTracker:
    """All requests under way. `most_waiting`: how many may wait for an engine to begin on them."""

    def __init__(self, most_waiting: int) -> None:
        self._most_waiting = most_waiting
        self._flights: set[TrackedRequest] = set()
        self._closing = False

    @property
    def waiting(self) -> int:
        return sum(not flight.begun for flight in self._flights)

    @property
    def running(self) -> int:
        return len(self._flights) - self.waiting

    def enter(self, flight: TrackedRequest) -> None:
        """Take a request in. Raises ApiError where there is no room, or no more time."""
        self.check_open()
        if self.waiting >= self._most_waiting:
            raise unavailable(f"{self.waiting} requests wait already; try again in a moment.")
        self._flights.add(flight)

    def leave(self, flight: TrackedRequest) -> None:
        flight.close()
        self._flights.discard(flight)

    def check_open(self) -> None:
        """Raises ApiError where the server stops."""
        if self._closing:
            raise _stopping()

    def refuse(self) -> None:
        """The server stops: nobody comes in any more."""
        self._closing = True

    def end_all(self) -> None:
        """The server stops now: what runs is ended with an error that says so."""
        self.refuse()
        for flight in list(self._flights):
            flight.end(_stopping())


def _stopping() -> ApiError:
    return unavailable("The server is stopping.", "server_stopping", retry_s=5)
