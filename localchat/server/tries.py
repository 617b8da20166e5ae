"""Several tries at one answer over the endpoint: one choice is sent, once it is chosen."""

import dataclasses
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from localchat.engine.events import Finished, Reasoning, Text
from localchat.engine.interface import Engine
from localchat.engine.request import GenerateRequest
from localchat.engine.stream import Stream
from localchat.server.generation import (
    ChoiceEnd,
    Generation,
    GenerationSpec,
    OutputEvent,
    PromptProgress,
)
from localchat.server.tracker import TrackedRequest
from localchat.tries.collection import Tries
from localchat.tries.critique import Critique
from localchat.tries.model_judge import ModelJudge, summed
from localchat.tries.spec import TriesSpec


class TriesGeneration(Generation):
    """A generation whose choices are tries: `events` gives the chosen one alone, when it is chosen."""

    def __init__(
        self, engine: Engine, spec: GenerationSpec, tracked: TrackedRequest, tries: TriesSpec
    ) -> None:
        super().__init__(engine, spec, tracked)
        self.report: dict[str, Any] = {}
        """What the tries brought and cost; known after `events`."""
        self._tries_spec = tries

    @property
    def choices(self) -> int:
        """One answer is made of all tries."""
        return 1

    async def events(self) -> AsyncGenerator[list[OutputEvent], None]:
        """Events of the chosen answer. Usage counts all tries, and the questions to the judge."""
        began_s = time.monotonic()
        tries = self._tries_spec.begin()
        held: defaultdict[int, list[OutputEvent]] = defaultdict(list)
        async with aclosing(super().events()) as batches:
            async for batch in batches:
                for event in batch:
                    if isinstance(event, PromptProgress):
                        yield [event]
                        continue
                    held[event.choice].append(event)
                    _add(tries, event)
                if tries.method == "vote" and tries.vote.open and tries.decided:
                    break
        first = self._tracked.usage
        assert first is not None
        judge = ModelJudge(self._ask, self._accepted)
        if self._tries_spec.critique:
            events = held[0]
            yield await self._criticized(judge, tries, events, first.completion_tokens, began_s)
        else:
            if self._tries_spec.judge:
                await judge.pick(tries)
            self.report = tries.report(judge.tokens).as_json()
            self.report["completion_tokens"] = first.completion_tokens + judge.tokens
            yield [_as_only(event) for event in held[tries.chosen]]
        self._tracked.usage = summed(first, judge.spent)

    async def _criticized(
        self,
        judge: ModelJudge,
        tries: Tries,
        events: list[OutputEvent],
        tokens: int,
        began_s: float,
    ) -> list[OutputEvent]:
        """Return the first answer, or a correction that won the comparison."""
        first_s = time.monotonic() - began_s
        if tries.whole:
            review = await judge.critique(tries.texts[0])
        else:
            review = Critique(tries.texts[0], judged=False)
        self.report = review.as_json() | {
            "completion_tokens": tokens + judge.tokens,
            "total_s": round(time.monotonic() - began_s, 4),
            "first_tokens": tokens,
            "first_s": round(first_s, 4),
        }
        if review.second is None or not review.replaced:
            return events
        return [Text(0, review.second), ChoiceEnd(0, "stop")]

    @property
    def _accepted(self) -> GenerateRequest:
        """The request that the engine accepted."""
        return self.spec.prompts[0][self.fallbacks_used[0]]

    async def _ask(self, request: GenerateRequest) -> Stream:
        stream = self._engine.generate(msgspec.structs.replace(request, user=self._tracked.user))
        self._tracked.attach(stream)
        return stream


def _add(tries: Tries, event: OutputEvent) -> None:
    match event:
        case Text() | Reasoning():
            tries.add(event)
        case ChoiceEnd(choice, reason):
            tries.add(Finished(choice, "length" if reason == "length" else "stop"))


def _as_only(event: OutputEvent) -> OutputEvent:
    """An event of a try as one of the only choice."""
    if isinstance(event, msgspec.Struct):
        return msgspec.structs.replace(event, choice=0)
    return dataclasses.replace(event, choice=0)
