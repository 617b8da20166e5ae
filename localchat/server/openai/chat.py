"""POST /v1/chat/completions, and the base of all endpoints that answer a conversation."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from localchat.engine.events import Done, Reasoning, Text, ToolCall, Usage
from localchat.engine.interface import Engine
from localchat.engine.request import GenerateRequest, Messages
from localchat.errors import NetworkError, TemplateError, UsageError
from localchat.server.content_blocks import (
    BlockClosed,
    BlockOpened,
    CollectedAnswer,
    ContentBlock,
    ContentBlocks,
)
from localchat.server.formatters import ChunkFormatter, ChunkHeader, new_id
from localchat.server.generation import (
    ChoiceEnd,
    Generation,
    GenerationSpec,
    OutputEvent,
    PromptEcho,
    PromptProgress,
    Reason,
)
from localchat.server.generation_response import GenerationResponse
from localchat.server.leases import AsyncLease
from localchat.server.openai.custom_tools import input_of
from localchat.server.openai.messages import (
    has_late_system,
    hoisted,
    late_as_users,
    with_one_voice,
    with_results_last,
    without_system,
)
from localchat.server.openai.protocol import (
    AssistantMessage,
    ChatBody,
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    ChatTokenLogprob,
    ChatTool,
    CustomCall,
    CustomCallDelta,
    CustomToolCallDelta,
    DeltaMessage,
    FunctionCall,
    FunctionCallDelta,
    MessageCustomToolCall,
    MessageToolCall,
    NamedFunction,
    NamedToolChoice,
    ToolCallDelta,
    chat_logprobs,
)
from localchat.server.openai.requests import chat_request
from localchat.server.openai.tries import requested_tries
from localchat.server.request_body import read_json
from localchat.server.sse import DONE
from localchat.server.sse import event as sse_event
from localchat.server.state import client_of, fingerprint, service_of
from localchat.server.timings import answer_timings
from localchat.tries.best_answer import BestAnswer
from localchat.tries.spec import TriesSpec


async def chat(request: Request) -> ASGIApp:
    """Validate the request; GenerationResponse answers it."""
    config = service_of(request).config
    body = await read_json(request, ChatBody, config.limits)
    as_functions = bool(body.functions and not body.tools)
    if as_functions:
        body = with_tools(body)
    prompt = chat_request(body, config.limits, client_of(request))
    cards = service_of(request).engines.models()
    own_model = cards[0].name if cards else ""
    tries = requested_tries(body, prompt, config.limits, own_model)
    endpoint = ChatEndpoint(body, prompt, config.loop_guard, as_functions, tries)
    return GenerationResponse(request, endpoint)


def with_tools(body: ChatBody) -> ChatBody:
    """Translate the deprecated `functions` and `function_call` to tools, with one call at a time."""
    choice = body.function_call
    return msgspec.structs.replace(
        body,
        tools=[ChatTool(function) for function in body.functions or ()],
        tool_choice=NamedToolChoice(choice) if isinstance(choice, NamedFunction) else choice,
        parallel_tool_calls=False,
    )


# ---------------------------------------------------------------------------- endpoint


@dataclass(frozen=True, slots=True)
class ConversationEndpoint:
    """Base of the endpoints that answer a conversation; each adds the formatter of its protocol."""

    body: ChatBody
    """The request, translated to a chat."""
    request: GenerateRequest
    loop_guard: bool

    @property
    def model(self) -> str | None:
        return self.body.model

    @property
    def streams(self) -> bool:
        return bool(self.body.stream)

    @property
    def requested_tokens(self) -> int | None:
        return self.body.max_completion_tokens or self.body.max_tokens

    async def spec(self, lease: AsyncLease) -> GenerationSpec:
        prompt = self.request.prompt
        assert isinstance(prompt, Messages)
        requests = [
            msgspec.structs.replace(self.request, prompt=fallback)
            for fallback in await template_fallbacks(lease, prompt)
        ]
        return GenerationSpec(
            [requests],
            self.body.parallel_tool_calls is False,
            self.loop_guard,
            progress=self.streams and bool(self.body.return_progress),
        )


async def template_fallbacks(lease: AsyncLease, prompt: Messages) -> list[Messages]:
    """Variants of a conversation for rigid chat templates, best first.

    A late system message stays one only if the template renders all of them in place: some templates render
    the last one alone, some move them to the beginning, which invalidates the prefix cache.
    """
    replace = msgspec.structs.replace
    variants = [prompt]
    if has_late_system(prompt.messages):
        in_place = await asyncio.to_thread(_renders_system_in_place, lease.engine, prompt)
        variants = [prompt] if in_place else []
        variants.append(replace(prompt, messages=late_as_users(prompt.messages)))
        variants.append(replace(prompt, messages=hoisted(prompt.messages)))
    if with_one_voice(prompt.messages) != prompt.messages:
        variants += [replace(each, messages=with_one_voice(each.messages)) for each in variants]
    if with_results_last(prompt.messages) != prompt.messages:
        variants += [replace(each, messages=with_results_last(each.messages)) for each in variants]
    if any(message.role == "system" for message in prompt.messages):
        variants.append(replace(prompt, messages=without_system(variants[-1].messages)))
    if prompt.continue_last:
        variants += [replace(each, thinking="off") for each in variants if each.thinking != "off"]
        variants.append(replace(variants[0], continue_last=False))
    return variants


def _renders_system_in_place(engine: Engine, prompt: Messages) -> bool:
    """True if the template renders each system message after the user's messages before it.

    A remote server that does not offer rendering is trusted to.
    """
    try:
        rendered = engine.render(prompt)
    except TemplateError:
        return False
    except (NetworkError, UsageError):
        return True
    end = 0
    for message in prompt.messages:
        text = message.content.strip()
        at = rendered.find(text, end) if message.role in ("system", "user") else -1
        if at >= 0:
            end = at + len(text)
        elif message.role == "system":
            return False
    return True


@dataclass(frozen=True, slots=True)
class ChatEndpoint(ConversationEndpoint):
    """A chat completion. as_functions: calls are written as the deprecated `function_call`."""

    as_functions: bool = False
    tries: TriesSpec | None = None

    async def spec(self, lease: AsyncLease) -> GenerationSpec:
        found = await ConversationEndpoint.spec(self, lease)
        return replace(found, tries=self.tries)

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
            as_functions=self.as_functions,
            custom=frozenset(tool.custom.name for tool in self.body.tools or () if tool.custom),
            best=generation.best,
        )


# ---------------------------------------------------------------------------- formatter


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormatter(ChunkFormatter):
    """Chat completion answers.

    Clients expect one kind of delta per chunk, one tool call per chunk, the role first, and the finish reason
    last in a chunk of its own. The role waits for the first delta, because benchmarks such as vLLM's take any
    chunk for the first token.
    """

    as_functions: bool = False
    custom: frozenset[str] = frozenset()
    """Names of custom tools."""
    open_calls: dict[int, ContentBlocks] = field(default_factory=dict)
    """Calls of custom tools that are not complete, by choice."""
    silent: set[int] = field(default_factory=set)
    """Choices without a delta so far."""
    best: BestAnswer | None = None
    """The tries that the answer is chosen from."""
    """Of an answer that is made of several."""

    def start(self, choices: int, prompt_tokens: int) -> bytes:
        self.silent.update(range(choices))
        self.unfinished.update(range(choices))
        return b""

    def event(self, event: OutputEvent) -> bytes:
        if self.custom and not isinstance(event, PromptEcho | PromptProgress):
            return self._custom_event(event)
        return self._plain_event(event)

    def _custom_event(self, event: Text | Reasoning | ToolCall | ChoiceEnd) -> bytes:
        """Write an event where custom tools may be called: their text is inside of JSON, and is sent once
        that is complete."""
        blocks = self.open_calls.setdefault(event.choice, ContentBlocks())
        written = b""
        for change in blocks.add(event):
            block = change.block
            if block.kind != "call" or block.name not in self.custom:
                continue
            delta = None
            if isinstance(change, BlockOpened):
                named = CustomCallDelta("", block.name)
                delta = CustomToolCallDelta(block.call, named, block.id, "custom")
            elif isinstance(change, BlockClosed):
                delta = CustomToolCallDelta(block.call, CustomCallDelta(input_of(block.text)))
            if delta is not None:
                written += self._delta(event.choice, DeltaMessage(tool_calls=[delta]))
        if isinstance(event, ToolCall) and any(
            block.call == event.call and block.name in self.custom for block in blocks.calls
        ):
            return written
        return written + self._plain_event(event)

    def _plain_event(self, event: OutputEvent) -> bytes:
        match event:
            case Text(choice, text, logprobs):
                if not text and not (self.with_logprobs and logprobs):
                    return b""
                tokens = chat_logprobs(logprobs) if self.with_logprobs else []
                return self._delta(choice, DeltaMessage(content=text), tokens)
            case Reasoning(choice, text):
                if text:
                    return self._delta(choice, DeltaMessage(reasoning_content=text))
                return b""
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
            case PromptEcho():
                return b""

    def response(self, answer: CollectedAnswer, usage: Usage, done: Done | None) -> bytes:
        choices = [self._choice(index, choice) for index, choice in enumerate(answer.choices)]
        timings = answer_timings(usage, done, own=self.with_timings)
        return self.header.chunk(choices, usage, timings, extension=self._extension)

    def finish(self, usage: Usage, done: Done | None) -> bytes:
        return self.last_chunk(usage, done, self._extension) + DONE

    @property
    def _extension(self) -> dict[str, Any] | None:
        report = None if self.best is None else self.best.report
        if report is None:
            return None
        return {"tries": report.as_json()}

    def _delta(
        self, choice: int, delta: DeltaMessage, tokens: list[ChatTokenLogprob] | None = None
    ) -> bytes:
        logprobs = ChatLogprobs(tokens) if tokens else None
        return self._chunk(ChatChunkChoice(choice, delta, None, logprobs))

    def _chunk(self, choice: ChatChunkChoice) -> bytes:
        return self._role(choice.index) + self.choice_event(choice)

    def _role(self, index: int) -> bytes:
        """Write the role of a choice before its first piece."""
        if index not in self.silent:
            return b""
        self.silent.discard(index)
        role = ChatChunkChoice(index, DeltaMessage(role="assistant", content=""), None)
        return self.header.event(role)

    def _choice(self, index: int, choice: ContentBlocks) -> ChatChoice:
        assert choice.end is not None
        text = choice.text
        calls = [
            _custom_call(block) if block.name in self.custom else _call(block)
            for block in choice.calls
        ]
        function = next(
            (call.function for call in calls if isinstance(call, MessageToolCall)), None
        )
        message = AssistantMessage(
            role="assistant",
            content=text if text or not calls else None,
            refusal=None,
            reasoning_content=choice.reasoning or None,
            tool_calls=None if self.as_functions else calls or None,
            function_call=function if self.as_functions else None,
        )
        logprobs = ChatLogprobs(chat_logprobs(choice.logprobs)) if self.with_logprobs else None
        reason = self._finish_reason(choice.end.reason)
        return ChatChoice(index, message, reason, logprobs, choice.end.why)

    def _finish_reason(self, reason: Reason) -> str:
        if self.as_functions and reason == "tool_calls":
            return "function_call"
        return reason


def _call_delta(call: ToolCall) -> ToolCallDelta:
    if call.id:
        return ToolCallDelta(call.call, FunctionCallDelta("", call.name), call.id, "function")
    return ToolCallDelta(call.call, FunctionCallDelta(call.arguments))


def _custom_call(block: ContentBlock) -> MessageCustomToolCall:
    return MessageCustomToolCall(block.id, "custom", CustomCall(block.name, input_of(block.text)))


def _call(block: ContentBlock) -> MessageToolCall:
    return MessageToolCall(block.id, "function", FunctionCall(block.name, block.text))
