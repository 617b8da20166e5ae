"""An answer to a plain completion, as chunks of a stream or in one piece."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import ASGIApp

from localchat.engine.events import Done, Text, TokenLogprob, Usage
from localchat.engine.request import GenerateRequest, TextPrompt, TokenIds
from localchat.server.formatters import ChunkFormatter, ChunkHeader, new_id
from localchat.server.generation import ChoiceEnd, GenerationSpec, OutputEvent, PromptEcho
from localchat.server.leases import AsyncLease
from localchat.server.openai.protocol import (
    CompletionBody,
    CompletionChoice,
    CompletionLogprobs,
    completion_logprobs,
)
from localchat.server.openai.requests import completion_requests
from localchat.server.request_body import decode, read_body
from localchat.server.state import client_of, fingerprint, service_of
from localchat.server.streaming import GenerationResponse


@dataclass(frozen=True, slots=True, kw_only=True)
class TextStream(ChunkFormatter):
    """`echoes`: the prompt of each choice, where prompts are to be said again; with log probabilities each
    waits for its own. `offsets`: characters that a choice has said so far."""

    echoes: Sequence[str] = ()
    offsets: dict[int, int] = field(default_factory=dict)

    def opening(self, choices: int, prompt_tokens: int) -> bytes:
        if self.with_logprobs:
            return b""
        return b"".join(
            self._text(choice, text, None) for choice, text in enumerate(self.echoes) if text
        )

    def told(self, told: OutputEvent) -> bytes:
        match told:
            case Text(choice, text, logprobs):
                if not text and not (self.with_logprobs and logprobs):
                    return b""
                offset = self.offsets.get(choice, 0)
                tokens = completion_logprobs(logprobs, offset) if self.with_logprobs else None
                return self._text(choice, text, tokens)
            case PromptEcho(choice, prompt) if self.echoes:
                echo = self.echoes[choice]
                return self._text(
                    choice, echo, completion_logprobs(prompt, 0, _first(echo, prompt))
                )
            case ChoiceEnd(choice, reason, why):
                return self.frame.event(CompletionChoice("", choice, None, reason, why))
        return b""

    def _text(self, choice: int, text: str, logprobs: CompletionLogprobs | None) -> bytes:
        self.offsets[choice] = self.offsets.get(choice, 0) + len(text)
        return self.frame.event(CompletionChoice(text, choice, logprobs, None))


@dataclass(slots=True)
class _Answer:
    text: list[str] = field(default_factory=list)
    tokens: list[TokenLogprob] = field(default_factory=list)
    end: ChoiceEnd | None = None


class TextWhole:
    """The whole completion as one object."""

    def __init__(
        self,
        frame: ChunkHeader,
        choices: int,
        *,
        echoes: Sequence[str] = (),
        with_timings: bool = False,
        with_logprobs: bool = False,
    ) -> None:
        self._frame = frame
        self._echoes = echoes
        self._answers = [_Answer() for _ in range(choices)]
        self._prompts: dict[int, tuple[TokenLogprob, ...]] = {}
        self._with_timings = with_timings
        self._with_logprobs = with_logprobs

    def take(self, told: OutputEvent) -> None:
        match told:
            case Text(choice, text, logprobs):
                self._answers[choice].text.append(text)
                self._answers[choice].tokens += logprobs
            case ChoiceEnd(choice):
                self._answers[choice].end = told
            case PromptEcho(choice, tokens):
                self._prompts[choice] = tokens

    def result(self, usage: Usage, done: Done | None) -> bytes:
        choices = [self._choice(index, answer) for index, answer in enumerate(self._answers)]
        return self._frame.chunk(choices, usage, done if self._with_timings else None)

    def _choice(self, index: int, answer: _Answer) -> CompletionChoice:
        assert answer.end is not None
        echo = self._echoes[index] if self._echoes else ""
        logprobs = (
            self._logprobs(index, echo, tuple(answer.tokens)) if self._with_logprobs else None
        )
        text = echo + "".join(answer.text)
        return CompletionChoice(text, index, logprobs, answer.end.reason, answer.end.why)

    def _logprobs(
        self, index: int, echo: str, answer: tuple[TokenLogprob, ...]
    ) -> CompletionLogprobs:
        prompt = self._prompts.get(index)
        if prompt is None:
            return completion_logprobs(answer, len(echo))
        return completion_logprobs((*prompt, *answer), 0, _first(echo, prompt))


def _first(prompt: str, rest: tuple[TokenLogprob, ...]) -> str:
    """The text of the prompt's first token, which nothing predicted: what the others do not hold."""
    held = b"".join(one.text for one in rest).decode("utf-8", "replace")
    return prompt[: max(0, len(prompt) - len(held))]


# POST /v1/completions: text to go on from, or a gap to fill (`suffix`).


async def completions(request: Request) -> ASGIApp:
    """Validated here; answered by the Exchange."""
    config = service_of(request).config
    body = decode(await read_body(request, config.limits), CompletionBody, config.limits)
    asked = completion_requests(body, config.limits, client_of(request))
    return GenerationResponse(request, CompletionEndpoint(body, asked, config.loop_guard))


@dataclass(frozen=True, slots=True)
class CompletionEndpoint:
    """See Plan. `echoes`: the prompt of each choice, once the engine could read it."""

    body: CompletionBody
    asked: tuple[GenerateRequest, ...]
    loop_guard: bool
    echoes: list[str] = field(default_factory=list)

    @property
    def model(self) -> str | None:
        return self.body.model

    @property
    def streams(self) -> bool:
        return bool(self.body.stream)

    @property
    def requested_tokens(self) -> int | None:
        return self.body.max_tokens

    async def wish(self, lease: AsyncLease) -> GenerationSpec:
        if self.body.echo:
            for asked in self.asked:
                text = await asyncio.to_thread(_prompt_text, lease, asked)
                self.echoes.extend([text] * asked.n)
        return GenerationSpec([[asked] for asked in self.asked], loop_guard=self.loop_guard)

    def stream(self, lease: AsyncLease, wish: GenerationSpec) -> TextStream:
        options = self.body.stream_options
        return TextStream(
            frame=self._frame(lease),
            echoes=self.echoes,
            with_usage=bool(options and options.include_usage),
            with_timings=bool(self.body.timings),
            with_logprobs=self.body.logprobs is not None,
        )

    def whole(self, lease: AsyncLease, wish: GenerationSpec) -> TextWhole:
        return TextWhole(
            self._frame(lease),
            wish.choices,
            echoes=self.echoes,
            with_timings=bool(self.body.timings),
            with_logprobs=self.body.logprobs is not None,
        )

    def _frame(self, lease: AsyncLease) -> ChunkHeader:
        model = self.body.model or lease.name
        return ChunkHeader(new_id("cmpl-"), "text_completion", model, fingerprint(lease.info))


def _prompt_text(lease: AsyncLease, asked: GenerateRequest) -> str:
    match asked.prompt:
        case TextPrompt(text):
            return text
        case TokenIds(tokens):
            return lease.engine.detokenize(tokens)
    return ""
