"""Run of a batch: keeps a number of requests in flight until every line of the input is answered."""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from localchat.batch.client import BatchClient, BatchReply
from localchat.batch.input_file import BatchInput, BatchLine, RawLine
from localchat.batch.output_file import (
    BatchAnswer,
    BatchOutput,
    BatchProblem,
    BatchResponse,
    answer_id,
)

_SPARE_SHARE: Final = 4
_LEAST_SPARE: Final = 2


@dataclass(frozen=True, slots=True)
class BatchServer:
    """Where a batch is sent."""

    url: str
    model: str
    """For lines that name none."""
    key: str = ""
    """Shown nowhere."""
    clients: int = 1
    """Requests in flight at once."""
    only_model: bool = False
    """`model` answers every line, whichever it names."""


@dataclass(slots=True)
class BatchProgress:
    """What a run has done so far; changed by the event loop that runs it."""

    total: int
    """Lines to be done in this run."""
    before: int = 0
    """Lines that were done before this run."""
    failed_before: int = 0
    """Of them, errors."""
    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cut: int = 0
    """Answers that a limit ended."""
    looping: int = 0
    """Answers that repeated themselves and were ended."""
    in_flight: int = 0
    began_s: float = field(default_factory=time.monotonic)
    ended_s: float | None = None

    @property
    def done(self) -> int:
        """Lines of this run that are in the output."""
        return self.answered + self.failed

    @property
    def elapsed_s(self) -> float:
        """Since the first request; the load of the model is not in it."""
        return (self.ended_s or time.monotonic()) - self.began_s

    def count_usage(self, body: Any) -> None:  # noqa: ANN401 - JSON
        """Add the tokens of an answer."""
        usage = body.get("usage") if isinstance(body, dict) else None
        if isinstance(usage, dict):
            self.prompt_tokens += _count(usage, "prompt_tokens")
            self.completion_tokens += _count(usage, "completion_tokens")
        end = _ended_early(body)
        self.cut += end == "length"
        self.looping += end == "repetition"
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details")
            self.cached_tokens += (
                _count(details, "cached_tokens") if isinstance(details, dict) else 0
            )


def _ended_early(body: Any) -> str:  # noqa: ANN401 - JSON
    """Return `length` or `repetition` for an answer with a choice that ended so, else nothing."""
    choices = body.get("choices") if isinstance(body, dict) else None
    for choice in choices if isinstance(choices, list) else []:
        if isinstance(choice, dict) and choice.get("finish_reason") == "length":
            if choice.get("stop_reason") == "repetition":
                return "repetition"
            return "length"
    return ""


class BatchRun:
    """The lines of an input that are not done yet, and their way into the output."""

    def __init__(
        self, source: BatchInput, output: BatchOutput, *, retry_errors: bool, limit: int | None
    ) -> None:
        """Reads both files. limit: most lines of this run. Raises UsageError where they do not match."""
        self.source = source
        self._output = output
        hashes = source.hashes()
        self._done, failed = output.answered(hashes, retry_errors=retry_errors)
        self.lines = len(hashes) - hashes.count(0)
        """Of the input."""
        before = sum(self._done)
        left = self.lines - before
        self._limit = left if limit is None else min(left, limit)
        self.progress = BatchProgress(self._limit, before, failed)
        self._ending = False

    def run(self, server: BatchServer, changed: Callable[[BatchProgress], None]) -> None:
        """Answer the lines. Blocks. changed: called after each line.

        Raises NetworkError where the server cannot be reached, and LocalchatError where the output cannot be
        written; what is answered stays."""
        self.progress.began_s = time.monotonic()
        try:
            asyncio.run(self._run(server, changed))
        finally:
            self.progress.ended_s = time.monotonic()

    def end(self) -> None:
        """Begin no further line: `run` returns once those in flight are answered. From any thread."""
        self._ending = True

    @property
    def ending(self) -> bool:
        """Whether `end` was called."""
        return self._ending

    @property
    def left(self) -> int:
        """Lines of the input that are not in the output."""
        return self.lines - self.progress.before - self.progress.done

    def _waiting(self) -> Iterator[RawLine]:
        for line in self.source.lines():
            if self._ending:
                return
            if line.number < len(self._done) and not self._done[line.number]:
                yield line

    async def _run(self, server: BatchServer, changed: Callable[[BatchProgress], None]) -> None:
        waiting = islice(self._waiting(), self._limit)
        async with BatchClient(server.url, server.key, server.clients) as client:

            async def work() -> None:
                for line in waiting:
                    self.progress.in_flight += 1
                    answer = await self._answer(client, server, line)
                    self._output.append(answer)
                    self._count(answer)
                    changed(self.progress)

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(server.clients, self._limit)):
                        group.create_task(work())
            except BaseExceptionGroup as problems:
                raise _first(problems) from None

    async def _answer(self, client: BatchClient, server: BatchServer, raw: RawLine) -> BatchAnswer:
        line = self.source.parse(raw)
        name = answer_id(line.number, raw.hash)
        if line.problem:
            return BatchAnswer(
                name, line.custom_id, error=BatchProblem("invalid_line", line.problem)
            )
        reply = await client.post(line.path, _body(line, server))
        return BatchAnswer(name, line.custom_id, _response(reply))

    def _count(self, answer: BatchAnswer) -> None:
        self.progress.in_flight -= 1
        if answer.failed:
            self.progress.failed += 1
            return
        self.progress.answered += 1
        assert answer.response is not None
        self.progress.count_usage(answer.response.body)


def clients_for(slots: int) -> int:
    """Requests in flight that keep so many slots full: a few wait at the server for the next free one."""
    return slots + max(_LEAST_SPARE, slots // _SPARE_SHARE)


def _body(line: BatchLine, server: BatchServer) -> dict[str, Any]:
    if server.only_model:
        return {**line.body, "model": server.model}
    if server.model:
        return {"model": server.model, **line.body}
    return line.body


def _response(reply: BatchReply) -> BatchResponse:
    return BatchResponse(reply.status, reply.request_id, reply.body)


def _count(usage: dict[str, Any], name: str) -> int:
    found = usage.get(name)
    return found if isinstance(found, int) else 0


def _first(problems: BaseExceptionGroup) -> BaseException:
    found: BaseException = problems
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
