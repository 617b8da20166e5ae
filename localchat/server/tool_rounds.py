"""Runs tools on the server's side: answers with calls, their results, and the next answer in one response.

The loop of the chat (`tools/loop.py`) runs the calls, with its limits of rounds, calls, repetition and result
sizes. Calls that the client runs itself end the response.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from operator import add
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import astuple, replace

from localchat.engine.events import Usage
from localchat.engine.request import CalledTool, GenerateRequest, Message, Messages
from localchat.server.chat.content_blocks import ContentBlocks
from localchat.server.chat.template_variants import template_variants
from localchat.server.generation import (
    AnswerWriter,
    ChoiceEnd,
    Generation,
    OutputEvent,
    ToolOutcome,
)
from localchat.server.leases import AsyncLease
from localchat.server.tracker import TrackedRequest

if TYPE_CHECKING:
    from localchat.tools.loop import CallResult, ToolTurn

log = logging.getLogger("localchat.server")

_CUT_OFF = "the answer ended before this call was complete"


class ToolRounds:
    """The events of an answer and of those after its calls. The generation has one choice."""

    def __init__(
        self, generation: Generation, turn: "ToolTurn", tracked: TrackedRequest, lease: AsyncLease
    ) -> None:
        """generation: the first round, which has started."""
        self._round = generation
        self._turn = turn
        self._tracked = tracked
        self._lease = lease
        self._spent = Usage(0, 0, 0, 0)
        """Usage of the earlier rounds."""

    async def events(
        self, writer: AnswerWriter | None = None
    ) -> AsyncGenerator[list[OutputEvent], None]:
        """Yield the events of all rounds. Only the last one ends the choice. See Generation."""
        try:
            while True:
                blocks = ContentBlocks()
                try:
                    async with aclosing(self._round.events()) as batches:
                        async for batch in batches:
                            for event in batch:
                                blocks.add(event)
                            output: list[OutputEvent] = [
                                event for event in batch if not isinstance(event, ChoiceEnd)
                            ]
                            if output:
                                yield output
                finally:
                    self._add_usage()
                outcomes, prompt = await self._next(blocks)
                if outcomes:
                    yield outcomes
                if prompt is None:
                    assert blocks.end is not None
                    yield [blocks.end]
                    return
                await self._start_round(prompt)
        finally:
            self._tracked.usage = self._spent

    def _add_usage(self) -> None:
        """Add the usage of a round that has ended."""
        usage = self._tracked.usage or Usage(0, 0, 0)
        counts = map(add, astuple(self._spent), astuple(usage))
        self._spent = Usage(*counts)

    async def _next(self, blocks: ContentBlocks) -> tuple[list[OutputEvent], Messages | None]:
        """Run the calls of an answer. Return their outcomes, and the next prompt if another answer is due."""
        turn = self._turn
        assert blocks.end is not None
        called = [CalledTool(call.name, call.text, call.id) for call in blocks.calls]
        answer = Message("assistant", blocks.text, blocks.reasoning, tuple(called))
        is_spent = self._max_tokens(self._round.request) == 0
        if not is_spent and turn.must_answer(answer):
            return [], self._prompt(())
        mine = [call for call in called if call.name in turn.tools]
        if not mine:
            return [], None
        numbers = {block.id: block.call for block in blocks.calls}
        if blocks.end.reason == "length" or turn.exhausted:
            return [ToolOutcome(0, numbers[call.id], error=_CUT_OFF) for call in mine], None
        results = await self._run(mine)
        outcomes: list[OutputEvent] = [
            _outcome(numbers[result.message.tool_call_id], result) for result in results
        ]
        if is_spent or len(mine) < len(called):
            return outcomes, None
        return outcomes, self._prompt((answer, *(result.message for result in results)))

    async def _run(self, calls: Sequence[CalledTool]) -> tuple["CallResult", ...]:
        """Run calls in a task of their own, which ends with the request."""
        # The client sees the outcome only, so reports are dropped.
        running = _RunningCalls(asyncio.ensure_future(self._turn.run(calls, lambda *_: None)))
        self._tracked.attach(running)
        results = await running.task
        # The loop of the chat ends normally after a cancellation.
        task = asyncio.current_task()
        if self._tracked.abort_error is not None:
            raise self._tracked.abort_error
        if self._tracked.client_left or (task is not None and task.cancelling()):
            raise asyncio.CancelledError
        for result in results:
            log.info(
                "%s called %s: %s in %.1f s",
                self._tracked.id,
                result.message.name,
                result.run.state,
                result.run.seconds,
            )
        return results

    def _prompt(self, added: Sequence[Message]) -> Messages:
        prompt = self._round.request.prompt
        assert isinstance(prompt, Messages)
        # A choice that forces a call is met by the first answer.
        choice = "auto"
        if prompt.tool_choice == "none" or self._turn.exhausted:
            choice = "none"
        messages = (*prompt.messages, *added)
        return replace(prompt, messages=messages, tool_choice=choice, continue_last=False)

    def _max_tokens(self, request: GenerateRequest) -> int | None:
        """Return the tokens that the request still allows. None: no limit."""
        if request.max_tokens is None:
            return None
        usage = self._tracked.usage
        assert usage is not None
        return max(0, request.max_tokens - usage.completion_tokens)

    async def _start_round(self, prompt: Messages) -> None:
        """Start the next round. Raises LocalchatError if the engine refuses it."""
        last = self._round.request
        last = replace(last, max_tokens=self._max_tokens(last))
        variants = await template_variants(self._lease, prompt)
        self._round = self._round.following([replace(last, prompt=variant) for variant in variants])
        await self._round.start()


class _RunningCalls(NamedTuple):
    """Calls in progress, which a tracked request cancels as it closes a stream."""

    task: "asyncio.Future[tuple[CallResult, ...]]"

    def close(self) -> None:
        self.task.cancel()


def _outcome(number: int, result: "CallResult") -> ToolOutcome:
    """Return the outcome of the call with this number in its answer."""
    from localchat.tools.loop import NO_MORE_CALLS

    text = result.message.content.removesuffix(NO_MORE_CALLS)
    if result.run.state == "done":
        return ToolOutcome(0, number, output=text)
    return ToolOutcome(0, number, error=text.removeprefix("Error: "))
