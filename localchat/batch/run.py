"""Run of a batch. Several requests are in flight until every line has an answer."""

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from localchat.batch.client import BatchClient
from localchat.batch.input_file import BatchInput, BatchLine, RawLine
from localchat.batch.output_file import (
    BatchAnswer,
    BatchOutput,
    BatchProblem,
    BatchResponse,
    answer_id,
)
from localchat.errors import innermost

_SPARE_SHARE: Final = 4
_MIN_SPARE: Final = 2


@dataclass(frozen=True, slots=True)
class BatchServer:
    """The server of a batch."""

    url: str
    model: str
    """Model of lines that name none."""
    key: str = ""
    """API key, which is never shown."""
    clients: int = 1
    """Maximum number of requests in flight."""
    only_model: bool = False
    """Whether `model` answers every line, even if the line names another model."""


@dataclass(slots=True)
class BatchProgress:
    """Progress of a run, updated by its event loop."""

    total: int
    """Lines of this run."""
    before: int = 0
    """Lines that earlier runs completed."""
    failed_before: int = 0
    """Errors among the lines of earlier runs."""
    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cut: int = 0
    """Answers that reached a limit."""
    looping: int = 0
    """Answers that the loop guard ended."""
    ignored_fields: str = ""
    """Fields that the server ignored in the first line that has any."""
    in_flight: int = 0
    began_s: float = field(default_factory=time.monotonic)
    ended_s: float | None = None

    @property
    def done(self) -> int:
        """Completed lines of this run."""
        return self.answered + self.failed

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first request, without the load of the model."""
        return (self.ended_s or time.monotonic()) - self.began_s

    def count_usage(self, body: Any) -> None:  # noqa: ANN401 - JSON
        """Add the token counts of an answer."""
        if not isinstance(body, dict):
            return
        end = _ended_early(body)
        self.cut += end == "length"
        self.looping += end == "repetition"
        usage = body.get("usage")
        if not isinstance(usage, dict):
            return
        # The second names are those of the Responses API.
        self.prompt_tokens += _count(usage, "prompt_tokens") or _count(usage, "input_tokens")
        self.completion_tokens += _count(usage, "completion_tokens") or _count(
            usage, "output_tokens"
        )
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
        if isinstance(details, dict):
            self.cached_tokens += _count(details, "cached_tokens")


def _ended_early(body: dict[str, Any]) -> str:
    """Return `length` or `repetition` if an answer ended early, otherwise an empty string."""
    # The Responses API has a status in place of choices.
    if body.get("status") == "incomplete":
        return "length"
    choices = body.get("choices")
    if not isinstance(choices, list):
        return ""
    for choice in choices:
        if isinstance(choice, dict) and choice.get("finish_reason") == "length":
            if choice.get("stop_reason") == "repetition":
                return "repetition"
            return "length"
    return ""


class BatchRun:
    """The remaining lines of an input, and their answers in the output."""

    def __init__(
        self, source: BatchInput, output: BatchOutput, *, retry_errors: bool, limit: int | None
    ) -> None:
        """Reads both files. limit: maximum lines of this run. Raises UsageError if the files do not match."""
        self.source = source
        self._output = output
        hashes = source.hashes()
        self._done, failed = output.answered(hashes, retry_errors=retry_errors)
        self.lines = len(hashes) - hashes.count(0)
        """Lines of the input."""
        before = sum(self._done)
        remaining = self.lines - before
        self._limit = remaining if limit is None else min(remaining, limit)
        self.progress = BatchProgress(self._limit, before, failed)
        self._ending = False

    def run(self, server: BatchServer, changed: Callable[[BatchProgress], None]) -> None:
        """Answer the lines, and block until the end. changed: called after each line.

        Raises NetworkError if the server is unreachable, and LocalchatError if the output cannot be written.
        Completed answers stay.
        """
        self.progress.began_s = time.monotonic()
        try:
            asyncio.run(self._run(server, changed))
        finally:
            self.progress.ended_s = time.monotonic()

    def end(self) -> None:
        """Start no further lines. `run` returns after the requests in flight. Thread-safe."""
        self._ending = True

    @property
    def ending(self) -> bool:
        """Whether `end` was called."""
        return self._ending

    @property
    def left(self) -> int:
        """Lines of the input without an answer."""
        return self.lines - self.progress.before - self.progress.done

    def _remaining(self) -> Iterator[RawLine]:
        for line in self.source.lines():
            if self._ending:
                return
            if line.number < len(self._done) and not self._done[line.number]:
                yield line

    async def _run(self, server: BatchServer, changed: Callable[[BatchProgress], None]) -> None:
        remaining = islice(self._remaining(), self._limit)
        async with BatchClient(server.url, server.key, server.clients) as client:

            async def work() -> None:
                for line in remaining:
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
                raise innermost(problems) from None

    async def _answer(self, client: BatchClient, server: BatchServer, raw: RawLine) -> BatchAnswer:
        line = self.source.parse(raw)
        name = answer_id(line.number, raw.hash)
        if line.problem:
            return BatchAnswer(
                name, line.custom_id, error=BatchProblem("invalid_line", line.problem)
            )
        reply = await client.post(line.path, _body(line, server))
        self.progress.ignored_fields = self.progress.ignored_fields or reply.ignored_fields
        return BatchAnswer(
            name, line.custom_id, BatchResponse(reply.status, reply.request_id, reply.body)
        )

    def _count(self, answer: BatchAnswer) -> None:
        self.progress.in_flight -= 1
        if answer.failed:
            self.progress.failed += 1
            return
        self.progress.answered += 1
        assert answer.response is not None
        self.progress.count_usage(answer.response.body)


def clients_for(slots: int) -> int:
    """Return the number of requests that keeps the slots full.

    A few of them wait at the server.
    """
    return slots + max(_MIN_SPARE, slots // _SPARE_SHARE)


def _body(line: BatchLine, server: BatchServer) -> dict[str, Any]:
    if server.only_model:
        return {**line.body, "model": server.model}
    if server.model:
        return {"model": server.model, **line.body}
    return line.body


def _count(usage: dict[str, Any], name: str) -> int:
    value = usage.get(name)
    return value if isinstance(value, int) else 0
