"""POST /v1/completions: continue a text, or fill a gap (`suffix`)."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import ASGIApp

from localchat.engine.events import Done, Text, TokenLogprob, Usage
from localchat.engine.request import GenerateRequest, TextPrompt, TokenIds
from localchat.server.chat.content_blocks import CollectedAnswer, ContentBlocks
from localchat.server.chat.endpoint import TextEndpoint
from localchat.server.formatters import new_id
from localchat.server.generation import (
    ChoiceEnd,
    Generation,
    GenerationSpec,
    OutputEvent,
    PromptEcho,
)
from localchat.server.generation_response import GenerationResponse
from localchat.server.leases import AsyncLease
from localchat.server.openai.chunks import ChunkFormatter, ChunkHeader
from localchat.server.openai.protocol import (
    CompletionBody,
    CompletionChoice,
    CompletionLogprobs,
    completion_logprobs,
)
from localchat.server.openai.requests import completion_requests
from localchat.server.request_body import read_json
from localchat.server.state import client_of, fingerprint, service_of
from localchat.server.timings import answer_timings


async def completions(request: Request) -> ASGIApp:
    """Validate the request; GenerationResponse answers it."""
    config = service_of(request).config
    body = await read_json(request, CompletionBody)
    prompts = completion_requests(body, config.limits, client_of(request))
    return GenerationResponse(request, CompletionEndpoint(body, prompts))


@dataclass(frozen=True, slots=True)
class CompletionEndpoint(TextEndpoint):
    """A plain completion of one or more prompts."""

    body: CompletionBody
    echoes: list[str] = field(default_factory=list)
    """Prompt of each choice, if the client wants an echo. `spec` fills it: that may need the tokenizer."""

    async def spec(self, lease: AsyncLease) -> GenerationSpec:
        if self.body.echo:
            for request in self.requests:
                text = await asyncio.to_thread(_prompt_text, lease, request)
                self.echoes.extend([text] * request.n)
        return GenerationSpec([[request] for request in self.requests])

    def formatter(self, lease: AsyncLease, generation: Generation) -> "CompletionFormatter":
        options = self.body.stream_options
        model = self.body.model or lease.name
        return CompletionFormatter(
            header=ChunkHeader(new_id("cmpl-"), "text_completion", model, fingerprint(lease.info)),
            echoes=self.echoes,
            with_usage=bool(options and options.include_usage),
            with_timings=bool(self.body.timings),
            with_logprobs=self.body.logprobs is not None,
        )


def _prompt_text(lease: AsyncLease, request: GenerateRequest) -> str:
    match request.prompt:
        case TextPrompt(text):
            return text
        case TokenIds(tokens):
            return lease.engine.detokenize(tokens)
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionFormatter(ChunkFormatter):
    """Plain completion answers."""

    echoes: Sequence[str] = ()
    """Prompt of each choice, if prompts are echoed. With log probabilities, the echo waits for them."""
    offsets: dict[int, int] = field(default_factory=dict)
    """Characters streamed so far, by choice."""

    def start(self, choices: int, prompt_tokens: int) -> bytes:
        self.unfinished.update(range(choices))
        if self.with_logprobs:
            return b""
        return b"".join(
            self._text(choice, text, None) for choice, text in enumerate(self.echoes) if text
        )

    def event(self, event: OutputEvent) -> bytes:
        match event:
            case Text(choice, text, logprobs):
                if not text and not (self.with_logprobs and logprobs):
                    return b""
                offset = self.offsets.get(choice, 0)
                tokens = completion_logprobs(logprobs, offset) if self.with_logprobs else None
                return self._text(choice, text, tokens)
            case PromptEcho(choice, prompt) if self.echoes:
                echo = self.echoes[choice]
                first = _first_token(echo, prompt)
                return self._text(choice, echo, completion_logprobs(prompt, 0, first))
            case ChoiceEnd(choice, reason, why):
                return self.end_event(choice, CompletionChoice("", choice, None, reason, why))
        return b""

    def response(self, answer: CollectedAnswer, usage: Usage, done: Done | None) -> bytes:
        choices = [self._choice(index, choice) for index, choice in enumerate(answer.choices)]
        return self.header.chunk(choices, usage, answer_timings(usage, done, own=self.with_timings))

    def _text(self, choice: int, text: str, logprobs: CompletionLogprobs | None) -> bytes:
        self.offsets[choice] = self.offsets.get(choice, 0) + len(text)
        if logprobs is not None:
            return self.header.event(CompletionChoice(text, choice, logprobs, None))
        return self.text_event(
            choice, Text, text, lambda text: CompletionChoice(text, choice, None, None)
        )

    def _choice(self, index: int, choice: ContentBlocks) -> CompletionChoice:
        assert choice.end is not None
        echo = self.echoes[index] if self.echoes else ""
        text = echo + choice.text
        logprobs = _logprobs(echo, choice) if self.with_logprobs else None
        return CompletionChoice(text, index, logprobs, choice.end.reason, choice.end.why)


def _logprobs(echo: str, choice: ContentBlocks) -> CompletionLogprobs:
    if choice.prompt is None:
        return completion_logprobs(choice.logprobs, len(echo))
    first = _first_token(echo, choice.prompt)
    return completion_logprobs((*choice.prompt, *choice.logprobs), 0, first)


def _first_token(prompt: str, others: tuple[TokenLogprob, ...]) -> bytes:
    """Return the bytes of the prompt's first token: the prompt without its other tokens.

    The engine does not report the first token, because it has no log probability. It may be a part of a
    character.
    """
    other_bytes = b"".join(token.text for token in others)
    prompt_bytes = prompt.encode("utf-8", "replace")
    if prompt_bytes.endswith(other_bytes):
        return prompt_bytes.removesuffix(other_bytes)
    # The text of a prompt of token ids has replacement characters, or a tokenizer changed the text.
    other_text = other_bytes.decode("utf-8", "replace")
    return prompt[: max(0, len(prompt) - len(other_text))].encode("utf-8", "replace")
