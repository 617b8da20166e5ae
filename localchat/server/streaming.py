"""One request that an engine answers, from the lease to the last byte, watched for the client's leaving.

Nothing is sent before the engine has accepted: until then every refusal is a real status. Handlers that do
not read from the connection never learn that a client left, so a task reads it for the whole time; when the
client is gone the work is cancelled, in whatever phase it is.
"""

import asyncio
import logging
from collections.abc import Awaitable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from localchat.errors import LocalchatError
from localchat.server.cancellation import disconnected
from localchat.server.errors import ApiError, internal_error, timed_out, to_api_error
from localchat.server.formatters import ResponseFormatter, StreamFormatter
from localchat.server.generation import Generation, GenerationSpec
from localchat.server.leases import AsyncLease
from localchat.server.sse import KEEP_ALIVE, EventStream
from localchat.server.state import Service, agent, service_of
from localchat.server.tracker import TrackedRequest

log = logging.getLogger("localchat.server")


class Endpoint(Protocol):
    """One request as its route understood it. `wanted_tokens`: the longest answer that was asked for."""

    @property
    def model(self) -> str | None: ...

    @property
    def streams(self) -> bool: ...

    @property
    def requested_tokens(self) -> int | None: ...

    async def wish(self, lease: AsyncLease) -> GenerationSpec:
        """What to ask this engine. Raises ApiError, LocalchatError."""
        ...

    def stream(self, lease: AsyncLease, wish: GenerationSpec) -> StreamFormatter: ...

    def whole(self, lease: AsyncLease, wish: GenerationSpec) -> ResponseFormatter: ...


@dataclass(frozen=True, slots=True)
class GenerationResponse:
    """An ASGI application for one request. Raises ApiError where nothing was sent yet."""

    request: Request
    plan: Endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = service_of(self.request)
        flight = TrackedRequest(
            id=scope.get("localchat.id", ""),
            model=self.plan.model or "",
            user=agent(self.request),
        )
        scope["localchat.flight"] = flight
        service.tracker.enter(flight)
        deadline = asyncio.get_running_loop().call_later(
            service.config.limits.request_s,
            lambda: flight.end(timed_out(service.config.limits.request_s)),
        )
        try:
            await _while_connected(self._work(service, flight, send), receive, flight)
        except ApiError as error:
            flight.error = error.code or "error"
            raise
        except LocalchatError as error:
            flight.error = error.code
            raise to_api_error(error, requested_tokens=self.plan.requested_tokens) from error
        finally:
            deadline.cancel()
            service.tracker.leave(flight)
            service.metrics.observe_request(flight)

    async def _work(self, service: Service, flight: TrackedRequest, send: Send) -> None:
        lease = await service.lease(self.plan.model, self.request)
        async with lease:
            flight.model = lease.name
            wish = await self.plan.wish(lease)
            flight.guided = wish.guided
            answering = Generation(lease.engine, wish, flight)
            try:
                await answering.begin()
            except LocalchatError:
                if flight.why is not None:
                    raise flight.why from None
                raise
            if self.plan.streams:
                presenter = self.plan.stream(lease, wish)
                await self._stream(service, answering, presenter, flight, send)
            else:
                await self._whole(answering, self.plan.whole(lease, wish), flight, send)

    async def _whole(
        self,
        answering: Generation,
        presenter: ResponseFormatter,
        flight: TrackedRequest,
        send: Send,
    ) -> None:
        async with aclosing(answering.told()) as telling:
            async for together in telling:
                for told in together:
                    presenter.take(told)
        assert flight.usage is not None
        flight.answered = True
        body = presenter.result(flight.usage, flight.done)
        response = Response(body, headers={"content-type": "application/json"})
        await response(self.request.scope, self.request.receive, send)

    async def _stream(
        self,
        service: Service,
        answering: Generation,
        presenter: StreamFormatter,
        flight: TrackedRequest,
        send: Send,
    ) -> None:
        config = service.config
        self.request.state.filler = KEEP_ALIVE  # see protocol.FILLER
        async with EventStream(send, config.heartbeat_s, config.event_s, presenter.alive) as stream:
            await stream.write(presenter.opening(answering.choices, answering.prompt_tokens))
            try:
                async with aclosing(answering.told()) as telling:
                    async for together in telling:
                        if events := b"".join(map(presenter.told, together)):
                            await stream.write(events)
                assert flight.usage is not None
                last = presenter.ending(flight.usage, flight.done)
            except (ApiError, LocalchatError) as error:
                last = presenter.broken(self._broken(service, flight, error))
            except Exception:
                log.exception("%s failed in the middle of its stream", flight.id)
                last = presenter.broken(self._broken(service, flight, internal_error()))
            flight.answered = True
            await stream.end(last)

    def _broken(
        self, service: Service, flight: TrackedRequest, error: ApiError | LocalchatError
    ) -> ApiError:
        """The error that an open stream ends with."""
        told = error if isinstance(error, ApiError) else to_api_error(error)
        if isinstance(error, LocalchatError):
            log.error("%s %s: %s", flight.id, error.code, error.message)
        flight.error = told.code or "error"
        service.metrics.failed(flight.error, told.status)
        return told


async def _while_connected(work: Awaitable[None], receive: Receive, flight: TrackedRequest) -> None:
    """Do the work, and drop it when the client leaves."""
    working = flight.work = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.cancelled() and flight.why is not None:
            raise flight.why
        if working.done() or flight.answered:  # the end of the answer ends the reading too
            await working
            return
        flight.gone = True
        flight.close()
        working.cancel()
        with suppress(asyncio.CancelledError, ApiError, LocalchatError):
            await working
    finally:
        working.cancel()
        watching.cancel()
