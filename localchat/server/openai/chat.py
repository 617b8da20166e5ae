"""POST /v1/chat/completions."""

from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import ASGIApp

from localchat.engine.events import Done, Reasoning, Text, ToolCall, Usage
from localchat.server.chat.content_blocks import (
    BlockClosed,
    BlockOpened,
    CollectedAnswer,
    ContentBlock,
    ContentBlocks,
)
from localchat.server.chat.custom_tools import input_of
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
    Reason,
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
    CustomCall,
    CustomCallDelta,
    CustomToolCallDelta,
    DeltaMessage,
    FunctionCall,
    FunctionCallDelta,
    MessageCustomToolCall,
    MessageToolCall,
    ToolCallDelta,
)
from localchat.server.openai.requests import as_chat, uses_functions
from localchat.server.request_body import read_json
from localchat.server.sse import event as sse_event
from localchat.server.state import client_of, fingerprint, service_of
from localchat.server.timings import answer_timings


async def chat(request: Request) -> ASGIApp:
    """Validate the request; GenerationResponse answers it."""
    service = service_of(request)
    limits = service.config.limits
    body = await read_json(request, ChatBody, limits, with_media=True)
    chat = await translate(request, lambda media: as_chat(body, media))
    prompt = engine_request(chat, limits, client_of(request))
    endpoint = ChatEndpoint(chat, prompt, service.config.loop_guard, body)
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
            generation=generation if self.body.timings_per_token else None,
            as_functions=uses_functions(self.body),
            custom=frozenset(tool.custom.name for tool in self.chat.tools if tool.custom),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormatter(ChunkFormatter):
    """Formats the answers of chats.

    Clients expect one kind of delta per chunk, one tool call per chunk, the role first, and the finish reason
    in a last chunk of its own. The role waits for the first delta: benchmarks such as vLLM's mistake any chunk
    for the first token.
    """

    as_functions: bool = False
    """Write calls as the deprecated `function_call`."""
    custom: frozenset[str] = frozenset()
    """Names of custom tools."""
    open_calls: dict[int, ContentBlocks] = field(default_factory=dict)
    """Incomplete calls of custom tools, by choice."""
    silent: set[int] = field(default_factory=set)
    """Choices without a delta so far."""

    def start(self, choices: int, prompt_tokens: int) -> bytes:
        self.silent.update(range(choices))
        self.unfinished.update(range(choices))
        return b""

    def event(self, event: OutputEvent) -> bytes:
        # Without custom tools, arguments are sent as they arrive.
        if self.custom and not isinstance(event, PromptEcho | PromptProgress | ToolOutcome):
            return self._custom_event(event)
        return self._plain_event(event)

    def _custom_event(self, event: Text | Reasoning | ToolCall | ChoiceEnd) -> bytes:
        """Format an event if custom tools may be called.

        The text of their call is a JSON string, and is sent once it is complete.
        """
        blocks = self.open_calls.setdefault(event.choice, ContentBlocks())
        events = b""
        for change in blocks.add(event):
            block = change.block
            if block.kind != "call" or block.name not in self.custom:
                continue
            delta = None
            if isinstance(change, BlockOpened):
                start = CustomCallDelta("", block.name)
                delta = CustomToolCallDelta(block.call, start, block.id, "custom")
            elif isinstance(change, BlockClosed):
                delta = CustomToolCallDelta(block.call, CustomCallDelta(input_of(block.text)))
            if delta is not None:
                events += self._delta(event.choice, DeltaMessage(tool_calls=[delta]))
        if isinstance(event, ToolCall) and any(
            block.call == event.call and block.name in self.custom for block in blocks.calls
        ):
            return events
        return events + self._plain_event(event)

    def _plain_event(self, event: OutputEvent) -> bytes:
        match event:
            case Text(choice, text, logprobs):
                if self.with_logprobs and logprobs:
                    return self._delta(choice, DeltaMessage(content=text), chat_logprobs(logprobs))
                return self._text(choice, Text, text)
            case Reasoning(choice, text):
                return self._text(choice, Reasoning, text)
            case ToolCall():
                delta = _call_delta(event)
                if self.as_functions:
                    return self._delta(event.choice, DeltaMessage(function_call=delta.function))
                return self._delta(event.choice, DeltaMessage(tool_calls=[delta]))
            case ChoiceEnd(choice, reason, why):
                end = ChatChunkChoice(
                    choice,
                    DeltaMessage(),
                    finish_reason=self._finish_reason(reason),
                    stop_reason=why,
                )
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
        return self._role(choice.index) + self.choice_event(choice)

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
        calls = [self._call(block) for block in choice.calls]
        if calls and not text:
            text = None
        functions = [call.function for call in calls if isinstance(call, MessageToolCall)]
        message = AssistantMessage(
            role="assistant",
            content=text,
            refusal=None,
            reasoning_content=choice.reasoning or None,
            tool_calls=None if self.as_functions else calls or None,
            function_call=functions[0] if self.as_functions and functions else None,
        )
        logprobs = ChatLogprobs(chat_logprobs(choice.logprobs)) if self.with_logprobs else None
        reason = self._finish_reason(choice.end.reason)
        return ChatChoice(index, message, reason, logprobs, choice.end.why)

    def _call(self, block: ContentBlock) -> MessageToolCall | MessageCustomToolCall:
        if block.name in self.custom:
            call = CustomCall(block.name, input_of(block.text))
            return MessageCustomToolCall(block.id, "custom", call)
        return MessageToolCall(block.id, "function", FunctionCall(block.name, block.text))

    def _finish_reason(self, reason: Reason) -> str:
        if self.as_functions and reason == "tool_calls":
            return "function_call"
        return reason


def _call_delta(call: ToolCall) -> ToolCallDelta:
    if call.id:
        return ToolCallDelta(call.call, FunctionCallDelta("", call.name), call.id, "function")
    return ToolCallDelta(call.call, FunctionCallDelta(call.arguments))
