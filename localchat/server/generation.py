"""One request at an engine: asked until it is accepted, then told in events that clients can take as they
are.

What the API promises and engines do not is done here: finish reasons, ids of tool calls, one call only where
a client wants one, an end to answers that go round in circles.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

import msgspec

from localchat.engine.events import (
    Accepted,
    Done,
    Event,
    Finished,
    MetricsSnapshot,
    Prefill,
    PromptLogprobs,
    Reasoning,
    Text,
    TokenLogprob,
    ToolCall,
    Usage,
)
from localchat.engine.interface import Engine
from localchat.engine.request import GenerateRequest, Messages
from localchat.engine.stream import Stream
from localchat.errors import (
    ContextExceeded,
    EngineClosed,
    LocalchatError,
    TemplateError,
    UsageError,
)
from localchat.server.cancellation import submit
from localchat.server.repetition import RepetitionDetector
from localchat.server.tracker import TrackedRequest

Reason: TypeAlias = Literal["stop", "length", "tool_calls"]
REPETITION = "repetition"
_COMMON_ANSWER = 256
"""Tokens that an answer to an ever shorter prompt should have room for, where that many were asked for."""


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """A choice is complete. `why`: the stop text that ended it, or REPETITION."""

    choice: int
    reason: Reason
    why: str | None = None


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """The log probabilities of a choice's prompt, its first token left out."""

    choice: int
    tokens: tuple[TokenLogprob, ...]


OutputEvent: TypeAlias = Text | Reasoning | ToolCall | PromptEcho | ChoiceEnd
"""What a reader is told. The first piece of a tool call has its id and name and no arguments."""


class EarlyStop(Protocol):
    """Ends the text of a choice where its reader wants no more."""

    def take(self, text: str) -> tuple[str, bool]:
        """What to tell of it now, and whether the text ends there."""
        ...

    def rest(self) -> str:
        """What was held back, when the text ended by itself."""
        ...


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """What is asked. `prompts`: for each prompt the ways to ask it, the next one tried where the model's
    template refuses the last, or where `ever_shorter` and the last leaves no room for its answer. `one_call`:
    the answer ends behind its first tool call. `brake`: makes what ends each choice's text early. `used`: once
    it is accepted, the way that each prompt was asked in."""

    prompts: Sequence[Sequence[GenerateRequest]]
    one_call: bool = False
    loop_guard: bool = True
    ever_shorter: bool = False
    brake: Callable[[], EarlyStop] | None = None
    used: list[int] = field(default_factory=list)

    @property
    def choices(self) -> int:
        return sum(template_fallbacks[0].n for template_fallbacks in self.prompts)

    @property
    def guided(self) -> bool:
        """Whether a grammar, a schema, a forced tool or a strict one binds the answer."""
        request = self.prompts[0][0]
        prompt = request.prompt
        if request.grammar is not None or not isinstance(prompt, Messages):
            return request.grammar is not None
        strict = any(tool["function"].get("strict") for tool in prompt.tools)
        return prompt.tool_choice not in ("auto", "none") or (
            strict and prompt.tool_choice == "auto"
        )


@dataclass(slots=True)
class _Choice:
    """calls: their ids. arguments: of the last one, as far as they came."""

    calls: dict[int, str] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    guards: tuple[RepetitionDetector, RepetitionDetector] = field(
        default_factory=lambda: (RepetitionDetector(), RepetitionDetector())
    )
    brake: EarlyStop | None = None
    ended: bool = False
    cut: bool = False


@dataclass(slots=True)
class _Counted:
    """Tokens of one prompt and its answers, until the engine says the exact number at the end."""

    prompt: int
    cached: int = 0
    completion: int = 0


class Generation:
    """`begin`, then iterate `told`. The flight owns the streams and closes them."""

    def __init__(self, engine: Engine, wish: GenerationSpec, flight: TrackedRequest) -> None:
        self._engine = engine
        self._wish = wish
        self._flight = flight
        self._sources: list[AsyncIterator[list[Event]]] = []
        make = wish.brake
        self._choices = [_Choice(brake=make() if make else None) for _ in range(wish.choices)]
        self._each: dict[int, int] = {}
        """How many choices a prompt has, by the index of its first."""
        for template_fallbacks in wish.prompts:
            self._each[sum(self._each.values())] = template_fallbacks[0].n
        self._counted: list[_Counted] = []
        self._done: list[Done] = []

    async def begin(self) -> None:
        """Until every prompt is accepted: all that can be refused is refused here. Raises LocalchatError."""
        for template_fallbacks in self._wish.prompts:
            self._sources.append(await self._ask(template_fallbacks))

    async def _ask(
        self, template_fallbacks: Sequence[GenerateRequest]
    ) -> AsyncIterator[list[Event]]:
        for way, request in enumerate(template_fallbacks):
            more = way + 1 < len(template_fallbacks)
            stream = await self._generate(request)
            source = stream.batches()
            try:
                first, *rest = await anext(source)
            except (ContextExceeded, UsageError) as refusal:
                if more and self._another(refusal):
                    continue
                raise
            assert isinstance(first, Accepted)
            if more and self._wish.ever_shorter and _cramped(first, request):
                stream.close()
                continue
            self._counted.append(_Counted(first.prompt_tokens))
            self._wish.used.append(way)
            return _behind(rest, source)
        raise AssertionError("there is a way to ask")

    def _another(self, refusal: LocalchatError) -> bool:
        """Whether another way may do where this one was refused."""
        if isinstance(refusal, TemplateError):
            return True
        too_much = isinstance(refusal, ContextExceeded) or "too_much" in refusal.details
        return self._wish.ever_shorter and too_much

    async def _generate(self, request: GenerateRequest) -> Stream:
        """In a thread, because a long prompt waits for the engine to read it; a reader that leaves meanwhile
        leaves no request behind."""
        named = msgspec.structs.replace(request, user=self._flight.user)
        stream = await submit(self._engine, named)
        self._flight.attach(stream)
        return stream

    @property
    def choices(self) -> int:
        return len(self._choices)

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts together, once it has begun."""
        return sum(one.prompt for one in self._counted)

    # ------------------------------------------------------------------------ events

    async def told(self) -> AsyncGenerator[list[OutputEvent], None]:
        """Everything the reader is told, what has come together in one list; the flight's usage and figures
        stand at the end, however it comes. Raises ApiError where the server ended it, else LocalchatError.
        Close it (`aclosing`)."""
        try:
            bases = list(self._each)
            async for at, events in self._merged():
                told: list[OutputEvent] = []
                for event in events:
                    self._count(at, event)
                    told += self._tidy(bases[at], event)
                    if self._cut_short:
                        break
                if told:
                    yield told
                if self._cut_short:
                    break  # the engine would go on; the flight's end stops it
        except EngineClosed:
            if self._flight.why is not None:
                raise self._flight.why from None  # no failure of the engine, which was told to
            raise
        finally:
            self._sum_up()

    @property
    def _cut_short(self) -> bool:
        """Whether all choices have ended, one of them here and not by the engine."""
        choices = self._choices
        return any(one.cut for one in choices) and all(one.ended for one in choices)

    async def _merged(self) -> AsyncIterator[tuple[int, list[Event]]]:
        """The events of all prompts as they come, with the index of their prompt."""
        if len(self._sources) == 1:
            async for events in self._sources[0]:
                yield 0, events
            return
        queue: asyncio.Queue[tuple[int, list[Event]] | LocalchatError | None] = asyncio.Queue()

        async def pump(at: int) -> None:
            try:
                async for events in self._sources[at]:
                    queue.put_nowait((at, events))
                queue.put_nowait(None)
            except LocalchatError as error:
                queue.put_nowait(error)

        pumps = [asyncio.create_task(pump(at)) for at in range(len(self._sources))]
        try:
            left = len(pumps)
            while left:
                item = await queue.get()
                if isinstance(item, LocalchatError):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    def _count(self, at: int, event: Event) -> None:
        """Keep the figures of the flight, whatever the reader is told."""
        flight, counted = self._flight, self._counted[at]
        match event:
            case Prefill(cached=cached):
                flight.begun = True
                counted.cached = cached
            case Text() | Reasoning() | ToolCall():
                flight.begun = True
                counted.completion += 1
                if flight.first_s is None:
                    flight.first_s = time.perf_counter()
            case MetricsSnapshot(completion_tokens=tokens):
                counted.completion = max(counted.completion, tokens)
            case Done(usage=usage):
                counted.prompt, counted.cached = usage.prompt_tokens, usage.cached_tokens
                counted.completion = usage.completion_tokens
                self._done.append(event)

    def _tidy(self, base: int, event: Event) -> list[OutputEvent]:
        match event:
            case Text(choice, text, logprobs):
                return self._text(Text(base + choice, text, logprobs))
            case Reasoning(choice, text):
                return self._piece(Reasoning(base + choice, text), base + choice, 1, text)
            case ToolCall(choice):
                return self._call(msgspec.structs.replace(event, choice=base + choice))
            case Finished(choice, reason, stop):
                return self._finish(base + choice, reason == "length", stop or None)
            case PromptLogprobs(tokens):
                return [PromptEcho(base + choice, tokens) for choice in range(self._each[base])]
        return []

    def _text(self, told: Text) -> list[OutputEvent]:
        state = self._choices[told.choice]
        if state.brake is None or state.ended:
            return self._piece(told, told.choice, 0, told.text)
        text, ended = state.brake.take(told.text)
        pieces = self._piece(Text(told.choice, text, told.logprobs), told.choice, 0, text)
        if ended and not state.ended:
            state.cut, state.brake = True, None
            pieces += self._finish(told.choice, True, None)
        return pieces

    def _piece(self, told: OutputEvent, choice: int, kind: int, text: str) -> list[OutputEvent]:
        state = self._choices[choice]
        if state.ended:
            return []
        if self._wish.loop_guard and state.guards[kind].is_repeating(text):
            state.cut = True
            return [told, *self._finish(choice, True, REPETITION)]
        return [told]

    def _call(self, event: ToolCall) -> list[OutputEvent]:
        state = self._choices[event.choice]
        if state.ended:
            return []
        told: list[OutputEvent] = []
        if event.call not in state.calls:
            if state.calls and self._wish.one_call:
                state.cut = True
                return self._finish(event.choice, False, None)
            state.calls[event.call] = event.id or f"call_{secrets.token_hex(12)}"
            state.arguments.clear()
            told.append(ToolCall(event.choice, event.call, state.calls[event.call], event.name, ""))
        if event.arguments:
            state.arguments.append(event.arguments)
            told.append(ToolCall(event.choice, event.call, arguments=event.arguments))
        if self._wish.loop_guard and state.guards[0].is_repeating(event.arguments):
            state.cut = True
            told += self._finish(event.choice, True, REPETITION)
        return told

    def _finish(self, choice: int, cut_off: bool, why: str | None) -> list[OutputEvent]:
        state = self._choices[choice]
        if state.ended:
            return []
        state.ended = True
        whole = bool(state.calls) and not (why and _is_broken("".join(state.arguments)))
        reason: Reason = "length" if cut_off else "tool_calls" if whole else "stop"
        self._flight.finish = why if why == REPETITION else reason
        rest = state.brake.rest() if state.brake is not None else ""
        return [*([Text(choice, rest)] if rest else []), ChoiceEnd(choice, reason, why)]

    def _sum_up(self) -> None:
        self._flight.usage = Usage(
            self.prompt_tokens,
            sum(one.cached for one in self._counted),
            sum(one.completion for one in self._counted),
        )
        self._flight.done = self._done[0] if self._done else None


async def _behind(
    first: list[Event], source: AsyncIterator[list[Event]]
) -> AsyncIterator[list[Event]]:
    """`first`, where there is any, and then the source."""
    if first:
        yield first
    async for events in source:
        yield events


def _is_broken(arguments: str) -> bool:
    """Whether a call's arguments end in the middle: a stop text stood in them, and nobody should run it."""
    try:
        msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        return True
    return False


def _cramped(accepted: Accepted, request: GenerateRequest) -> bool:
    """Whether the prompt took the room of an answer of common length."""
    return accepted.max_tokens < min(request.max_tokens or 0, _COMMON_ANSWER)
