"""Answers one generation request over HTTP, and cancels it if the client disconnects.

Nothing is sent before the engine has accepted the request, so a refusal gets a real HTTP status. Only a handler
that reads from its connection notices a disconnect. A task therefore reads all the time, and a disconnect
cancels the work in any phase.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from localchat.chat.prompt_steps import prompt_steps
from localchat.engine.interface import Engine
from localchat.errors import ContextExceeded, LocalchatError
from localchat.server.cancellation import disconnected
from localchat.server.chat.content_blocks import CollectedAnswer
from localchat.server.errors import ApiError, internal_error, log_text, timed_out, to_api_error
from localchat.server.formatters import AnswerFormatter
from localchat.server.generation import EventSource, Generation, GenerationSpec, OutputEvent
from localchat.server.leases import AsyncLease
from localchat.server.sse import SSE, EventStream, Framing
from localchat.server.state import Service, service_of, user_agent
from localchat.server.tool_rounds import ToolRounds
from localchat.server.tracker import TrackedRequest
from localchat.server.uvicorn_http import WRITE

log = logging.getLogger("localchat.server")

SCHEMA_RELAXED = b"x-localchat-schema-relaxed"
"""Header with the keywords of JSON schemas that are not enforced."""


class Endpoint(Protocol):
    """A validated request of a protocol."""

    @property
    def model(self) -> str | None:
        """The model name in the request."""
        ...

    @property
    def streams(self) -> bool:
        """True if the client wants a stream."""
        ...

    @property
    def requested_tokens(self) -> int | None:
        """Requested length of the answer in tokens."""
        ...

    async def spec(self, lease: AsyncLease) -> GenerationSpec:
        """Return the generation to run on this engine. Raises ApiError, LocalchatError."""
        ...

    def formatter(self, lease: AsyncLease, generation: Generation) -> AnswerFormatter:
        """Return the formatter of the answer. Called once the engine has accepted the request."""
        ...


@dataclass(frozen=True, slots=True)
class GenerationResponse:
    """ASGI application that answers one request. Raises ApiError as long as nothing was sent."""

    request: Request
    endpoint: Endpoint
    framing: Framing = SSE
    """Format of the answer if the client wants a stream."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = service_of(self.request)
        tracked = TrackedRequest(
            id=scope.get("localchat.id", ""),
            model=self.endpoint.model or "",
            user=user_agent(self.request),
        )
        scope["localchat.request"] = tracked
        service.tracker.add(tracked)
        deadline = asyncio.get_running_loop().call_later(
            service.config.limits.request_s,
            lambda: tracked.abort(timed_out(service.config.limits.request_s)),
        )
        try:
            await _while_connected(self._answer(service, tracked, send), receive, tracked)
        except ApiError as error:
            tracked.error = error.label
            raise
        except LocalchatError as error:
            tracked.error = error.code
            raise to_api_error(error, requested_tokens=self.endpoint.requested_tokens) from error
        finally:
            deadline.cancel()
            service.tracker.remove(tracked)
            service.metrics.observe_request(tracked)

    async def _answer(self, service: Service, tracked: TrackedRequest, send: Send) -> None:
        lease = await service.lease(self.endpoint.model, self.request)
        async with lease:
            tracked.model = lease.name
            tracked.load_s = time.perf_counter() - tracked.arrived_s
            spec = await self.endpoint.spec(lease)
            tracked.guided = spec.guided
            loop_guard = service.config.loop_guard
            generation = Generation(lease.engine, spec, tracked, loop_guard=loop_guard)
            events: EventSource = generation.events
            if spec.tools is not None:
                events = ToolRounds(generation, spec.tools.turn, tracked, lease).events
            try:
                await generation.start()
            except LocalchatError as error:
                if isinstance(error, ContextExceeded):
                    error.steps = await _steps(error, lease.engine)
                raise
            if generation.relaxed:
                keywords = ", ".join(generation.relaxed)
                log.warning("%s: schema keywords not enforced: %s", tracked.id, keywords)
            # Only an accepted request may change how long its model stays loaded.
            if spec.fills_gap:
                lease.fill_gap()
            if spec.keep_alive_s is not None:
                lease.keep_alive(spec.keep_alive_s)
            formatter = self.endpoint.formatter(lease, generation)
            if self.endpoint.streams:
                await self._stream(service, generation, events, formatter, tracked, send)
            else:
                await self._respond(generation, events, formatter, tracked, send)

    async def _respond(
        self,
        generation: Generation,
        events: EventSource,
        formatter: AnswerFormatter,
        tracked: TrackedRequest,
        send: Send,
    ) -> None:
        """Send the whole answer as one response."""
        answer = CollectedAnswer(generation.spec.choices)
        async with aclosing(events(None)) as batches:
            async for batch in batches:
                for event in batch:
                    answer.add(event)
        assert tracked.usage is not None
        tracked.answered = True
        body = formatter.response(answer, tracked.usage, tracked.done)
        headers = {name.decode(): value.decode() for name, value in _headers(generation)}
        response = Response(body, headers={"content-type": "application/json", **headers})
        await response(self.request.scope, self.request.receive, send)

    async def _stream(
        self,
        service: Service,
        generation: Generation,
        events: EventSource,
        formatter: AnswerFormatter,
        tracked: TrackedRequest,
        send: Send,
    ) -> None:
        """Send the answer as server-sent events."""
        config = service.config
        connection = self.request.scope.get("state", {})
        async with EventStream(
            send,
            config.heartbeat_s,
            config.event_s,
            formatter.heartbeat,
            _headers(generation),
            connection.get(WRITE, lambda piece: False),
            self.framing,
        ) as stream:
            await stream.write(formatter.start(generation.spec.choices, generation.prompt_tokens))
            try:
                writer = _StreamWriter(formatter, stream)
                async with aclosing(events(writer)) as batches:
                    async for batch in batches:
                        if data := b"".join(map(formatter.event, batch)):
                            await stream.write(data)
                assert tracked.usage is not None
                end = formatter.finish(tracked.usage, tracked.done)
            except (ApiError, LocalchatError) as error:
                reason = tracked.abort_error or error
                end = formatter.error(self._count_error(service, tracked, reason))
            except Exception:
                # The status is sent already, so that an exception handler could not answer any more.
                log.exception("%s failed in the middle of its stream", tracked.id)
                end = formatter.error(self._count_error(service, tracked, internal_error()))
            tracked.answered = True
            await stream.end(end)

    def _count_error(
        self, service: Service, tracked: TrackedRequest, error: ApiError | LocalchatError
    ) -> ApiError:
        """Log and count the error that ends an open stream."""
        if isinstance(error, LocalchatError):
            log.error("%s %s: %s", tracked.id, error.code, log_text(error))
            error = to_api_error(error)
        tracked.error = error.label
        service.metrics.count_error(tracked.error, error.status)
        return error


class _StreamWriter:
    """An AnswerWriter into an open stream."""

    def __init__(self, formatter: AnswerFormatter, stream: EventStream) -> None:
        self.ready = stream.ready
        self._format = formatter.event
        self._write = stream.write_now

    def write(self, events: Sequence[OutputEvent]) -> None:
        if data := b"".join(map(self._format, events)):
            self._write(data)


async def _steps(error: ContextExceeded, engine: Engine) -> tuple[dict[str, object], ...]:
    """Return ways to make room for a prompt that is too long."""
    prompt = error.details.get("prompt_tokens")
    context = error.details.get("context_tokens")
    if not isinstance(prompt, int) or not isinstance(context, int):
        return ()
    try:
        info = await asyncio.to_thread(engine.info)
    except LocalchatError:
        return ()
    return tuple(step.as_json() for step in prompt_steps(prompt, info, context))


def _headers(generation: Generation) -> list[tuple[bytes, bytes]]:
    """Return the headers that report deviations from the request."""
    headers = list(generation.spec.headers)
    if generation.relaxed:
        headers.append((SCHEMA_RELAXED, ", ".join(generation.relaxed).encode("ascii", "replace")))
    return headers


async def _while_connected(
    work: Awaitable[None], receive: Receive, tracked: TrackedRequest
) -> None:
    """Do the work, unless the client disconnects.

    The work runs in the request's own task. A new task would start after those of all requests that arrived
    together, and the engine would be idle until the last of them was read.
    """
    task = asyncio.current_task()
    assert task is not None, "no task runs"
    tracked.work = task
    watching = asyncio.ensure_future(disconnected(receive))

    def on_disconnect(_: "asyncio.Future[None]") -> None:
        # uvicorn also reports the end of an answer as a disconnect.
        if not watching.cancelled() and tracked.work is task and not tracked.answered:
            tracked.client_left = True
            tracked.close()
            tracked.cancel_work()

    watching.add_done_callback(on_disconnect)
    try:
        await work
    except asyncio.CancelledError:
        for _ in range(tracked.cancels):
            task.uncancel()
        if not tracked.cancels or task.cancelling():
            raise  # another task has cancelled the request too
        if tracked.abort_error is not None and not tracked.client_left:
            raise tracked.abort_error from None
    except (ApiError, LocalchatError):
        if tracked.client_left:
            return
        if tracked.abort_error is not None:
            raise tracked.abort_error from None  # the server itself closed the streams
        raise
    finally:
        tracked.work = None
        watching.cancel()
