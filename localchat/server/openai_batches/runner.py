"""Runner of batches: answers their lines on the server's own engines, behind everybody who waits for an answer.

One batch runs at a time, the oldest first. Each answer is on disk before the next line begins, so that a server
that starts again goes on there and asks no line twice.
"""

import asyncio
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from starlette.applications import Starlette
from starlette.routing import Route

from localchat.batch.client import BatchReply
from localchat.batch.input_file import PATHS, BatchInput, RawLine
from localchat.batch.output_file import (
    BatchAnswer,
    BatchOutput,
    BatchProblem,
    BatchResponse,
    answer_id,
)
from localchat.errors import LocalchatError, UsageError
from localchat.server.body_budget import BodyBudget
from localchat.server.cancellation import to_its_end
from localchat.server.exception_handlers import HANDLERS
from localchat.server.openai.chat import chat
from localchat.server.openai.completions import completions
from localchat.server.openai.embeddings import embeddings
from localchat.server.openai.requests import Client
from localchat.server.openai_batches.completion import begin, end, validate
from localchat.server.openai_batches.line_request import ask
from localchat.server.openai_batches.store import OPEN, BatchRecord, BatchStore
from localchat.server.state import Service, key_hash

log = logging.getLogger("localchat.server")

_ROUTES: Final = dict(zip(PATHS, (chat, completions, embeddings), strict=True))
_AGENT: Final = "batch"
_TRIES: Final = 8
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 60.0
_POLL_S: Final = 5.0
"""Until a folder that another server has used is taken over."""
_LOOK_AGAIN_S: Final = 3600.0
_GATE_S: Final = 0.05
_SAVE_S: Final = 1.0
_SHARE: Final = 4


class BatchRunner:
    """Runs the batches of a folder. On the event loop of the server."""

    def __init__(self, service: Service, store: BatchStore) -> None:
        self.store = store
        self.active = False
        """This server runs the batches of the folder, and no other does."""
        self._service = service
        self._wake = asyncio.Event()
        self._current: BatchRecord | None = None
        self._answering: asyncio.Task[None] | None = None
        self._in_flight = 0
        self._app = Starlette(
            routes=[
                Route(path.removeprefix("/v1"), route, methods=["POST"])
                for path, route in _ROUTES.items()
            ],
            exception_handlers=HANDLERS,
        )
        self._app.state.service = service
        self._app.state.bodies = BodyBudget(service.config.limits.bodies_bytes)

    # Not wait_for: that of Python 3.11 loses a cancellation that comes as what it waits for ends, and a
    # server that stops would wait for this task forever.

    async def work(self) -> None:
        """Run batches until it is cancelled. What is in flight then is asked again by the next server."""
        told = ""
        while True:
            try:
                with self._folder_lock() as locked:
                    self.active = locked
                    while locked:
                        self._wake.clear()  # before the look: what is created from here on wakes it again
                        record = await asyncio.to_thread(self._next)
                        if record is None:
                            with suppress(TimeoutError):
                                async with asyncio.timeout(_LOOK_AGAIN_S):
                                    await self._wake.wait()
                            continue
                        await self._run(record)
                        told = ""
            except* (OSError, LocalchatError) as group:
                # A full disk, for instance: the batch goes on once there is room.
                if (trouble := "; ".join(map(str, group.exceptions))) != told:
                    log.error("batches cannot go on: %s", trouble)
                told = trouble
            except* Exception:
                log.exception("batches cannot go on")
            finally:
                self.active = False
            await asyncio.sleep(_POLL_S)

    def wake(self) -> None:
        """Look for new batches."""
        self._wake.set()

    def find(self, id_: str, owner: str) -> BatchRecord | None:
        """A batch of this owner, as it is now."""
        current = self._current
        if current is not None and current.batch.id == id_ and current.owner == owner:
            return current
        return self.store.batch(id_, owner)

    def cancel(self, record: BatchRecord) -> BatchRecord:
        """Cancel a batch that is not done: lines in flight end without an answer. Raises OSError."""
        current = self._current
        if current is not None and current.batch.id == record.batch.id:
            record = current
        record.batch.status = "cancelling"
        record.batch.cancelling_at = int(time.time())
        self.store.save(record)
        if record is current and self._answering is not None:
            self._answering.cancel()
        self.wake()
        return record

    # ------------------------------------------------------------------------ one batch

    @contextmanager
    def _folder_lock(self) -> Iterator[bool]:
        """Whether this server is the one that runs batches. Raises OSError."""
        self.store.prepare()
        handle = os.open(self.store.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(handle)

    def _next(self) -> BatchRecord | None:
        """The oldest batch that is not done, of an owner whose key the server still has."""
        keys = self._service.config.api_keys
        owners = {key_hash(key) for key in keys} if keys else {""}
        for record in reversed(self.store.batches()):
            if record.batch.status in OPEN and record.owner in owners:
                return record
        return None

    async def _run(self, record: BatchRecord) -> None:
        # Read again: it may have been cancelled since. From here on `cancel` finds the record itself.
        record = self._current = self.store.batch(record.batch.id) or record
        try:
            if record.batch.status == "validating":
                limits = self._service.config.limits
                begin(
                    self.store,
                    record,
                    await asyncio.to_thread(validate, self.store, record, limits),
                )
            if record.batch.status == "in_progress":
                await self._answer_all(record)
            if record.batch.status in ("finalizing", "cancelling"):
                # No other server may take the folder before.
                await to_its_end(asyncio.to_thread(end, self.store, record))
        except UsageError as error:
            log.error("%s: %s", record.batch.id, error.message)
            problem = ("invalid_file", "The input file is not what it was.", None)
            begin(self.store, record, [problem])
        finally:
            self._current = self._answering = None

    async def _answer_all(self, record: BatchRecord) -> None:
        """Answer lines until all are done, the batch expires or is cancelled."""
        batch = record.batch
        if batch.expires_at > time.time():
            self._answering = asyncio.create_task(self._answer_lines(record))
            try:
                async with asyncio.timeout(batch.expires_at - time.time()):
                    await self._answering
            except TimeoutError:
                log.warning("%s expired", batch.id)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                assert task is not None
                if batch.status != "cancelling" or task.cancelling():
                    raise  # the server stops
        if batch.status == "in_progress":
            batch.status = "finalizing"
            batch.finalizing_at = int(time.time())
        await to_its_end(asyncio.to_thread(self.store.save, record))

    async def _answer_lines(self, record: BatchRecord) -> None:
        source = BatchInput(self.store.content(record.batch.input_file_id))
        with BatchOutput(self.store.answers(record.batch.id)) as output:
            hashes = await asyncio.to_thread(source.hashes)
            done, failed = await asyncio.to_thread(output.answered, hashes)
            counts = record.batch.request_counts
            counts.failed, counts.completed = failed, sum(done) - failed
            lines = (line for line in source.lines() if not done[line.number])
            saved_s = time.monotonic()

            async def answer_some() -> None:
                nonlocal saved_s
                for line in lines:
                    answer = await self._answer(record, source, line)
                    output.append(answer)
                    counts.failed += answer.failed
                    counts.completed += not answer.failed
                    if time.monotonic() - saved_s >= _SAVE_S:
                        saved_s = time.monotonic()
                        # What is saved here must not replace what is saved at the end.
                        await to_its_end(asyncio.to_thread(self.store.save, record))

            async with asyncio.TaskGroup() as group:
                for _ in range(self._service.config.limits.batch_requests):
                    group.create_task(answer_some())

    async def _answer(self, record: BatchRecord, source: BatchInput, raw: RawLine) -> BatchAnswer:
        line = source.parse(raw)
        name = answer_id(line.number, raw.hash)
        client = Client(record.owner, _AGENT, background=True)
        pause_s = _FIRST_PAUSE_S
        for _ in range(_TRIES):
            await self._gate()
            self._in_flight += 1
            try:
                reply, may_retry = await ask(self._app, line.path, line.body, client)
            except Exception:
                log.exception("%s: line %d failed", record.batch.id, line.number)
                problem = BatchProblem("internal_error", "The server failed to answer this line.")
                return BatchAnswer(name, line.custom_id, error=problem)
            finally:
                self._in_flight -= 1
            if not may_retry:
                break
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)
        return BatchAnswer(name, line.custom_id, _response(reply))

    async def _gate(self) -> None:
        """Wait for a place in flight: few are taken while a client waits for an answer."""
        most = self._service.config.limits.batch_requests
        tracker = self._service.tracker
        while self._in_flight >= (
            max(1, most // _SHARE) if tracker.running + tracker.waiting else most
        ):
            await asyncio.sleep(_GATE_S)


def _response(reply: BatchReply) -> BatchResponse:
    return BatchResponse(reply.status, reply.request_id, reply.body)
