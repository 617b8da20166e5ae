"""POST /v1/chat/completions."""

from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import ASGIApp

from localchat.engine.events import Done, Reasoning, Text, ToolCall, Usage
from localchat.server.chat.content_blocks import CollectedAnswer, ContentBlocks
from localchat.server.chat.endpoint import ConversationEndpoint
from localchat.server.chat.logprobs import ChatTokenLogprob, chat_logprobs
from localchat.server.chat.media import translate
from localchat.server.chat.request import engine_request
from localchat.server.formatters import new_id
from localchat.server.generation import (
    ChoiceEnd,
    Generation,
    OutputEvent,
    PromptEcho,
    PromptProgress,
    ToolOutcome,
)
from localchat.server.generation_response import GenerationResponse
from localchat.server.leases import AsyncLease
from localchat.server.openai.chunks import ChunkFormatter, ChunkHeader
from localchat.server.openai.protocol import (
    AssistantMessage,
    ChatBody,
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    DeltaMessage,
    FunctionCall,
    FunctionCallDelta,
    MessageToolCall,
    ToolCallDelta,
)
from localchat.server.openai.requests import as_chat
from localchat.server.request_body import read_json
from localchat.server.sse import event as sse_event
from localchat.server.state import client_of, fingerprint, service_of
from localchat.server.timings import answer_timings


async def chat(request: Request) -> ASGIApp:
    """Validate the request; GenerationResponse answers it."""
    service = service_of(request)
    limits = service.config.limits
    body = await read_json(request, ChatBody, with_media=True)
    chat = await translate(request, lambda media: as_chat(body, media))
    prompt = engine_request(chat, limits, client_of(request))
    endpoint = ChatEndpoint(chat, prompt, body)
    return GenerationResponse(request, endpoint)


@dataclass(frozen=True, slots=True)
class ChatEndpoint(ConversationEndpoint):
    """A chat completion."""

    body: ChatBody

    def formatter(self, lease: AsyncLease, generation: Generation) -> "ChatFormatter":
        options = self.body.stream_options
        kind = "chat.completion.chunk" if self.streams else "chat.completion"
        model = self.body.model or lease.name
        return ChatFormatter(
            header=ChunkHeader(new_id("chatcmpl-"), kind, model, fingerprint(lease.info)),
            with_usage=bool(options and options.include_usage),
            with_timings=bool(self.body.timings),
            with_logprobs=bool(self.body.logprobs),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormatter(ChunkFormatter):
    """Formats the answers of chats.

    Clients expect one kind of delta per chunk, one tool call per chunk, the role first, and the finish reason
    in a last chunk of its own. The role waits for the first delta: benchmarks such as vLLM's mistake any chunk
    for the first token.
    """

    silent: set[int] = field(default_factory=set)
    """Choices without a delta so far."""

    def start(self, choices: int, prompt_tokens: int) -> bytes:
        self.silent.update(range(choices))
        self.unfinished.update(range(choices))
        return b""

    def event(self, event: OutputEvent) -> bytes:
        match event:
            case Text(choice, text, logprobs):
                if self.with_logprobs and logprobs:
                    return self._delta(choice, DeltaMessage(content=text), chat_logprobs(logprobs))
                return self._text(choice, Text, text)
            case Reasoning(choice, text):
                return self._text(choice, Reasoning, text)
            case ToolCall():
                return self._delta(event.choice, DeltaMessage(tool_calls=[_call_delta(event)]))
            case ChoiceEnd(choice, reason, why):
                end = ChatChunkChoice(choice, DeltaMessage(), finish_reason=reason, stop_reason=why)
                return self._role(choice) + self.end_event(choice, end)
            case PromptProgress():
                return sse_event(self.header.chunk([], progress=event.as_json()))
            case PromptEcho() | ToolOutcome():
                return b""  # this protocol has no place for them

    def response(self, answer: CollectedAnswer, usage: Usage, done: Done | None) -> bytes:
        choices = [self._choice(index, choice) for index, choice in enumerate(answer.choices)]
        timings = answer_timings(usage, done, own=self.with_timings)
        return self.header.chunk(choices, usage, timings)

    def _delta(
        self, choice: int, delta: DeltaMessage, tokens: list[ChatTokenLogprob] | None = None
    ) -> bytes:
        logprobs = ChatLogprobs(tokens) if tokens else None
        return self._chunk(ChatChunkChoice(choice, delta, None, logprobs))

    def _text(self, index: int, kind: type[Text | Reasoning], text: str) -> bytes:
        def choice(text: str) -> ChatChunkChoice:
            delta = DeltaMessage(content=text)
            if kind is Reasoning:
                delta = DeltaMessage(reasoning_content=text)
            return ChatChunkChoice(index, delta, None)

        if not text:
            return b""
        return self._role(index) + self.text_event(index, kind, text, choice)

    def _chunk(self, choice: ChatChunkChoice) -> bytes:
        return self._role(choice.index) + self.header.event(choice)

    def _role(self, index: int) -> bytes:
        """Return the event with the role, before the first piece of a choice."""
        if index not in self.silent:
            return b""
        self.silent.discard(index)
        role = ChatChunkChoice(index, DeltaMessage(role="assistant", content=""), None)
        return self.header.event(role)

    def _choice(self, index: int, choice: ContentBlocks) -> ChatChoice:
        assert choice.end is not None
        text: str | None = choice.text
        calls = [
            MessageToolCall(block.id, "function", FunctionCall(block.name, block.text))
            for block in choice.calls
        ]
        if calls and not text:
            text = None
        message = AssistantMessage(
            role="assistant",
            content=text,
            refusal=None,
            reasoning_content=choice.reasoning or None,
            tool_calls=calls or None,
        )
        logprobs = ChatLogprobs(chat_logprobs(choice.logprobs)) if self.with_logprobs else None
        return ChatChoice(index, message, choice.end.reason, logprobs, choice.end.why)


def _call_delta(call: ToolCall) -> ToolCallDelta:
    if call.id:
        return ToolCallDelta(call.call, FunctionCallDelta("", call.name), call.id, "function")
    return ToolCallDelta(call.call, FunctionCallDelta(call.arguments))
