"""Generation: runs prompts on an engine and converts its events for a protocol.

It adds what the APIs promise and engines do not provide: finish reasons, ids of tool calls, and a single call
for clients that want only one.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

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
from localchat.engine.request import GenerateRequest, Infill, Messages
from localchat.engine.stream import Stream
from localchat.errors import (
    ContextExceeded,
    LocalchatError,
    TemplateError,
    UsageError,
)
from localchat.server.tracker import TrackedRequest

if TYPE_CHECKING:
    from localchat.tools.loop import ToolTurn

Reason: TypeAlias = Literal["stop", "length", "tool_calls"]
REPETITION = "repetition"
_TYPICAL_ANSWER_TOKENS = 256
"""Tokens that a shortened prompt should leave for its answer."""


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """A choice is complete."""

    choice: int
    reason: Reason
    why: str | None = None
    """The stop string that ended the choice, or REPETITION."""
    context_full: bool = False
    """Whether it ended because the context is full."""


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """Log probabilities of a prompt, without its first token."""

    choice: int
    tokens: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """Progress of a prompt in tokens, for clients that request it."""

    choice: int
    """The first choice of the prompt."""
    total: int
    cached: int
    processed: int
    """Computed and cached tokens."""
    elapsed_ms: float

    def as_json(self) -> dict[str, float]:
        """Return the fields of llama.cpp's `prompt_progress`."""
        return {
            "total": self.total,
            "cache": self.cached,
            "processed": self.processed,
            "time_ms": self.elapsed_ms,
        }


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """Outcome of a call that this server ran: an output or an error."""

    choice: int
    call: int
    """Number of the call in its answer. It means the last call with this number."""
    output: str = ""
    error: str = ""


OutputEvent: TypeAlias = (
    Text | Reasoning | ToolCall | ToolOutcome | PromptEcho | PromptProgress | ChoiceEnd
)
"""Event for a formatter. A tool call starts with an event that has an id, a name and no arguments."""


EventSource: TypeAlias = "Callable[[AnswerWriter | None], AsyncGenerator[list[OutputEvent], None]]"
"""Yields the events of an answer. See Generation.events."""


class EarlyStop(Protocol):
    """Ends the text of a choice before the model does."""

    def push(self, text: str) -> tuple[str, bool]:
        """Add the next piece. Returns the text to send now, and True if the text ends there."""
        ...

    def flush(self) -> str:
        """Return the buffered text, once the model has ended the text."""
        ...


class AnswerWriter(Protocol):
    """Writes output events as they arrive, without a turn of the event loop."""

    def ready(self) -> bool:
        """Return False if the events must wait, for example for a slow client."""
        ...

    def write(self, events: Sequence[OutputEvent]) -> None:
        """Write events. Called only while ready."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTools:
    """The tools that the server runs for one request. A protocol adds what its formatter needs."""

    turn: "ToolTurn"


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """Prompts of one generation, and options of their answers."""

    prompts: Sequence[Sequence[GenerateRequest]]
    """Requests of each prompt, best first. The next one is tried if the chat template refuses one or, with
    `shorten_to_fit`, if one leaves too little room for its answer."""
    single_call: bool = False
    """End the answer after its first tool call."""
    shorten_to_fit: bool = False
    """Treat the requests of a prompt as ever shorter versions of it."""
    progress: bool = False
    """Report the progress of prompts."""
    early_stop: Callable[[], EarlyStop] | None = None
    """Returns the early stop of a choice."""
    keep_alive_s: float | None = None
    """Seconds that the model stays loaded afterwards without users. None means the server's default."""
    tools: ServerTools | None = None
    """Tools that the server itself runs (`tool_rounds.py`)."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    """Headers that report deviations from the request."""

    @property
    def choices(self) -> int:
        """Number of answers to all prompts."""
        return sum(requests[0].n for requests in self.prompts)

    @property
    def fills_gap(self) -> bool:
        """True for a completion in an editor."""
        return any(isinstance(requests[0].prompt, Infill) for requests in self.prompts)

    @property
    def guided(self) -> bool:
        """True if a grammar, a schema or a tool constrains the answer."""
        request = self.prompts[0][0]
        prompt = request.prompt
        if request.grammar is not None or not isinstance(prompt, Messages):
            return request.grammar is not None
        if prompt.tool_choice == "auto":
            return any(tool["function"].get("strict") for tool in prompt.tools)
        return prompt.tool_choice != "none"


@dataclass(slots=True)
class _Choice:
    """State of one choice."""

    call_ids: dict[int, str] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    """Pieces of the last call's arguments."""
    early_stop: EarlyStop | None = None
    ended: bool = False


@dataclass(slots=True)
class _TokenCounts:
    """Tokens of one prompt and its answers, counted here until Done reports the exact numbers."""

    prompt: int
    cached: int = 0
    completion: int = 0
    reasoning: int = 0


class Generation:
    """Runs a GenerationSpec. Call `start`, then iterate `events`. The tracked request owns the streams."""

    def __init__(
        self,
        engine: Engine,
        spec: GenerationSpec,
        tracked: TrackedRequest,
        *,
        loop_guard: bool = True,
    ) -> None:
        """loop_guard: end an answer that repeats itself."""
        self.spec = spec
        self._loop_guard = loop_guard
        self.fallbacks_used: list[int] = []
        """Index of the accepted request, for each prompt."""
        self.relaxed: tuple[str, ...] = ()
        """Keywords of JSON schemas that are not enforced; known after `start`."""
        self._started_s = time.perf_counter()
        self._engine = engine
        self._tracked = tracked
        self._sources: list[tuple[list[Event], Stream]] = []
        """Stream of each prompt, after the events that arrived with its acceptance."""
        self._choices = [_Choice() for _ in range(spec.choices)]
        if spec.early_stop is not None:
            for choice in self._choices:
                choice.early_stop = spec.early_stop()
        numbers = (requests[0].n for requests in spec.prompts)
        self._first_choices = list(accumulate(numbers, initial=0))
        """First choice of each prompt, and then the number of all choices."""
        self._cut_short = False
        """True once this server has ended a choice that the engine would continue."""
        self._counts: list[_TokenCounts] = []
        self._done: list[Done] = []

    @property
    def prompt_tokens(self) -> int:
        """Sum of all prompts, known after `start`."""
        return sum(counts.prompt for counts in self._counts)

    @property
    def request(self) -> GenerateRequest:
        """The accepted request of a generation with one prompt, known after `start`."""
        (requests,) = self.spec.prompts
        return requests[self.fallbacks_used[0]]

    def following(self, requests: Sequence[GenerateRequest]) -> "Generation":
        """Return the generation of another prompt with the same options and without tools."""
        spec = replace(self.spec, prompts=[requests], tools=None)
        return Generation(self._engine, spec, self._tracked, loop_guard=self._loop_guard)

    async def start(self) -> None:
        """Submit every prompt and wait until the engine accepts it. Raises LocalchatError if it does not."""
        for requests in self.spec.prompts:
            self._sources.append(await self._submit(requests))

    async def _submit(self, requests: Sequence[GenerateRequest]) -> tuple[list[Event], Stream]:
        """Submit a prompt by its first request that the engine accepts."""
        for index, request in enumerate(requests):
            is_last = index + 1 == len(requests)
            request = msgspec.structs.replace(
                request, user=self._tracked.user, loop_guard=self._loop_guard
            )
            stream = self._engine.generate(request)
            self._tracked.attach(stream)
            try:
                accepted, *events = await stream.batch()
            except (ContextExceeded, UsageError) as refusal:
                if not is_last and self._may_fall_back(refusal):
                    continue
                raise
            assert isinstance(accepted, Accepted)
            # The prompt fits, but its answer would be cut off at once.
            if not is_last and self.spec.shorten_to_fit and _is_cramped(accepted, request):
                stream.close()
                continue
            self.relaxed = accepted.relaxed
            self._counts.append(_TokenCounts(accepted.prompt_tokens))
            self.fallbacks_used.append(index)
            return events, stream
        raise AssertionError("a prompt has at least one request")

    def _may_fall_back(self, refusal: LocalchatError) -> bool:
        """Return True if the engine may accept the next request of the prompt."""
        if isinstance(refusal, TemplateError):
            return True
        too_long = isinstance(refusal, ContextExceeded) or "too_much" in refusal.details
        return self.spec.shorten_to_fit and too_long

    async def events(
        self, writer: AnswerWriter | None = None
    ) -> AsyncGenerator[list[OutputEvent], None]:
        """Yield the output events of all choices, in lists that arrived together. Close it (`aclosing`).

        Plain pieces of text may go to the writer instead. However the iteration ends, the tracked request then
        has usage and metrics. Raises LocalchatError.
        """
        try:
            async for prompt, events in self._merged(writer):
                output: list[OutputEvent] = []
                for event in events:
                    self._count(prompt, event)
                    output += self._convert(prompt, event)
                    if self._ended_early:
                        break
                if output:
                    yield output
                if self._ended_early:
                    break
        finally:
            # The engine would continue while a slow client reads the end.
            for _, stream in self._sources:
                stream.close()
            self._tracked.usage = self._usage()
            if self._done:
                self._tracked.done = _with_load(self._done[0], self._tracked.load_s)

    def _usage(self) -> Usage:
        return Usage(
            self.prompt_tokens,
            sum(counts.cached for counts in self._counts),
            sum(counts.completion for counts in self._counts),
            sum(counts.reasoning for counts in self._counts),
        )

    @property
    def _ended_early(self) -> bool:
        """True if all choices have ended, and the engine has not ended all of them."""
        return self._cut_short and all(choice.ended for choice in self._choices)

    async def _merged(self, writer: AnswerWriter | None) -> AsyncIterator[tuple[int, list[Event]]]:
        """Yield the events of all prompts as they arrive, with the index of their prompt."""
        # Nearly all requests have one prompt. They need neither tasks nor a queue.
        if len(self._sources) == 1:
            events, stream = self._sources[0]
            take = None
            if writer is not None and self.spec.early_stop is None:
                take = self._writing(writer)
            while events := events or await stream.batch(take):
                yield 0, events
                events = []
            return
        queue: asyncio.Queue[tuple[int, list[Event]] | LocalchatError | None] = asyncio.Queue()

        async def pump(prompt: int) -> None:
            events, stream = self._sources[prompt]
            try:
                while events := events or await stream.batch():
                    queue.put_nowait((prompt, events))
                    events = []
                queue.put_nowait(None)
            except LocalchatError as error:
                queue.put_nowait(error)

        pumps = [asyncio.create_task(pump(prompt)) for prompt in range(len(self._sources))]
        try:
            unfinished = len(pumps)
            while unfinished:
                item = await queue.get()
                if isinstance(item, LocalchatError):
                    raise item
                if item is None:
                    unfinished -= 1
                else:
                    yield item
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    def _writing(self, writer: AnswerWriter) -> Callable[[list[Event]], bool]:
        """Return the function that writes pieces of text. It leaves all other events to `events`."""

        def write(events: list[Event]) -> bool:
            pieces: list[OutputEvent] = []
            for event in events:
                if isinstance(event, Text | Reasoning):
                    if not self._choices[event.choice].ended:
                        pieces.append(event)
                elif not isinstance(event, MetricsSnapshot):
                    return False
            if not writer.ready():
                return False
            for event in events:
                self._count(0, event)
            if pieces:
                writer.write(pieces)
            return True

        return write

    def _count(self, prompt: int, event: Event) -> None:
        """Update the tracked request, also for events that the client does not see."""
        tracked = self._tracked
        counts = self._counts[prompt]
        match event:
            case Text() | Reasoning() | ToolCall():
                tracked.started = True
                counts.completion += 1
                counts.reasoning += isinstance(event, Reasoning)
                if tracked.first_token_s is None:
                    tracked.first_token_s = time.perf_counter()
            case Prefill(cached=cached, why_missed=why_missed):
                tracked.started = True
                tracked.why_missed = tracked.why_missed or why_missed
                counts.cached = cached
            case MetricsSnapshot(completion_tokens=tokens):
                counts.completion = max(counts.completion, tokens)
            case Done(usage=usage):
                counts.prompt = usage.prompt_tokens
                counts.cached = usage.cached_tokens
                counts.completion = usage.completion_tokens
                counts.reasoning = usage.reasoning_tokens
                self._done.append(event)

    def _convert(self, prompt: int, event: Event) -> list[OutputEvent]:
        """Convert an event of the engine. The engine numbers the choices of each prompt from 0."""
        base = self._first_choices[prompt]
        match event:
            case Text(choice, text, logprobs):
                return self._text(Text(base + choice, text, logprobs))
            case Reasoning(choice, text):
                return self._piece(Reasoning(base + choice, text))
            case ToolCall(choice):
                return self._call(msgspec.structs.replace(event, choice=base + choice))
            case Finished(choice, reason, stop, limit):
                if reason == REPETITION:
                    return self._end(base + choice, REPETITION, cut_off=True)
                return self._end(
                    base + choice,
                    stop or None,
                    cut_off=reason == "length",
                    context_full=limit == "context",
                )
            case Prefill(done, cached, total) if self.spec.progress:
                elapsed_ms = (time.perf_counter() - self._started_s) * 1e3
                return [PromptProgress(base, total, cached, done, elapsed_ms)]
            case PromptLogprobs(tokens):
                choices = range(base, self._first_choices[prompt + 1])
                return [PromptEcho(choice, tokens) for choice in choices]
        return []

    def _text(self, event: Text) -> list[OutputEvent]:
        state = self._choices[event.choice]
        if state.early_stop is None or state.ended:
            return self._piece(event)
        text, ended = state.early_stop.push(event.text)
        output = self._piece(Text(event.choice, text, event.logprobs))
        if ended and not state.ended:
            self._cut_short = True
            state.early_stop = None
            output += self._end(event.choice, None, cut_off=True)
        return output

    def _piece(self, event: Text | Reasoning) -> list[OutputEvent]:
        if self._choices[event.choice].ended:
            return []
        return [event]

    def _call(self, event: ToolCall) -> list[OutputEvent]:
        state = self._choices[event.choice]
        if state.ended:
            return []
        output: list[OutputEvent] = []
        if event.call not in state.call_ids:
            if state.call_ids and self.spec.single_call:
                self._cut_short = True
                return self._end(event.choice, None, cut_off=False)
            id_ = state.call_ids[event.call] = event.id or f"call_{secrets.token_hex(12)}"
            state.arguments.clear()
            output.append(ToolCall(event.choice, event.call, id_, event.name, ""))
        if event.arguments:
            state.arguments.append(event.arguments)
            output.append(ToolCall(event.choice, event.call, arguments=event.arguments))
        return output

    def _end(
        self, choice: int, why: str | None, *, cut_off: bool, context_full: bool = False
    ) -> list[OutputEvent]:
        state = self._choices[choice]
        if state.ended:
            return []
        state.ended = True
        reason: Reason = "stop"
        if cut_off:
            reason = "length"
        # A stop string inside of the arguments leaves a broken call, which the client must not run.
        elif state.call_ids and not (why and _is_broken("".join(state.arguments))):
            reason = "tool_calls"
        self._tracked.finish_reason = REPETITION if why == REPETITION else reason
        output: list[OutputEvent] = []
        if state.early_stop is not None and (text := state.early_stop.flush()):
            output.append(Text(choice, text))
        return [*output, ChoiceEnd(choice, reason, why, context_full)]


def _with_load(done: Done, load_s: float) -> Done:
    """Add the time before the engine had the request, which the engine cannot measure."""
    timings = msgspec.structs.replace(done.timings, load_s=done.timings.load_s + load_s)
    return msgspec.structs.replace(done, timings=timings)


def _is_broken(arguments: str) -> bool:
    """Return True if the arguments of a call are incomplete JSON."""
    try:
        msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        return True
    return False


def _is_cramped(accepted: Accepted, request: GenerateRequest) -> bool:
    """Return True if the prompt leaves less room than a typical answer needs."""
    return accepted.max_tokens < min(request.max_tokens or 0, _TYPICAL_ANSWER_TOKENS)
