"""An answer to a chat, as chunks of a stream or in one piece."""

import asyncio
from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from localchat.engine.events import Done, Reasoning, Text, ToolCall, Usage
from localchat.engine.interface import Engine
from localchat.engine.request import GenerateRequest, Messages
from localchat.errors import NetworkError, TemplateError, UsageError
from localchat.server.formatters import ChunkFormatter, ChunkHeader, new_id
from localchat.server.generation import ChoiceEnd, GenerationSpec, OutputEvent, PromptEcho, Reason
from localchat.server.leases import AsyncLease
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
    DeltaMessage,
    FunctionCall,
    FunctionCallDelta,
    MessageToolCall,
    NamedFunction,
    NamedToolChoice,
    ToolCallDelta,
    chat_logprobs,
)
from localchat.server.openai.requests import chat_request
from localchat.server.request_body import decode, read_body
from localchat.server.state import client_of, fingerprint, service_of
from localchat.server.streaming import GenerationResponse


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatStream(ChunkFormatter):
    """One kind of delta per chunk, one tool call per chunk, the role first, the reason last and alone.
    as_functions: the one call is told in the words of before there were tools."""

    as_functions: bool = False

    def opening(self, choices: int, prompt_tokens: int) -> bytes:
        return b"".join(
            self._delta(choice, DeltaMessage(role="assistant", content=""))
            for choice in range(choices)
        )

    def told(self, told: OutputEvent) -> bytes:
        match told:
            case Text(choice, text, logprobs):
                if not text and not (self.with_logprobs and logprobs):
                    return b""
                tokens = chat_logprobs(logprobs) if self.with_logprobs else []
                return self._delta(choice, DeltaMessage(content=text), tokens)
            case Reasoning(choice, text):
                return self._delta(choice, DeltaMessage(reasoning_content=text)) if text else b""
            case ToolCall():
                piece = _piece(told)
                if self.as_functions:
                    return self._delta(told.choice, DeltaMessage(function_call=piece.function))
                return self._delta(told.choice, DeltaMessage(tool_calls=[piece]))
            case ChoiceEnd(choice, reason, why):
                word = _reason(reason, self.as_functions)
                return self.frame.event(
                    ChatChunkChoice(choice, DeltaMessage(), finish_reason=word, stop_reason=why)
                )
            case PromptEcho():
                return b""

    def _delta(
        self, choice: int, delta: DeltaMessage, tokens: list[ChatTokenLogprob] | None = None
    ) -> bytes:
        logprobs = ChatLogprobs(tokens) if tokens else None
        return self.frame.event(ChatChunkChoice(choice, delta, None, logprobs))


def _reason(reason: Reason, as_functions: bool) -> str:
    return "function_call" if as_functions and reason == "tool_calls" else reason


def _piece(call: ToolCall) -> ToolCallDelta:
    if call.id:
        return ToolCallDelta(call.call, FunctionCallDelta("", call.name), call.id, "function")
    return ToolCallDelta(call.call, FunctionCallDelta(call.arguments))


@dataclass(slots=True)
class _Answer:
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, tuple[str, str, list[str]]] = field(default_factory=dict)
    tokens: list[ChatTokenLogprob] = field(default_factory=list)
    end: ChoiceEnd | None = None


class ChatWhole:
    """The whole answer as one object."""

    def __init__(
        self,
        frame: ChunkHeader,
        choices: int,
        *,
        with_timings: bool = False,
        with_logprobs: bool = False,
        as_functions: bool = False,
    ) -> None:
        self._frame = frame
        self._answers = [_Answer() for _ in range(choices)]
        self._with_timings = with_timings
        self._with_logprobs = with_logprobs
        self._as_functions = as_functions

    def take(self, told: OutputEvent) -> None:
        match told:
            case Text(choice, text, logprobs):
                self._answers[choice].text.append(text)
                if self._with_logprobs:
                    self._answers[choice].tokens += chat_logprobs(logprobs)
            case Reasoning(choice, text):
                self._answers[choice].reasoning.append(text)
            case ToolCall():
                calls = self._answers[told.choice].calls
                if told.id:
                    calls[told.call] = (told.id, told.name, [])
                calls[told.call][2].append(told.arguments)
            case ChoiceEnd(choice):
                self._answers[choice].end = told

    def result(self, usage: Usage, done: Done | None) -> bytes:
        choices = [self._choice(index, answer) for index, answer in enumerate(self._answers)]
        return self._frame.chunk(choices, usage, done if self._with_timings else None)

    def _choice(self, index: int, answer: _Answer) -> ChatChoice:
        assert answer.end is not None
        text = "".join(answer.text)
        calls = [
            MessageToolCall(id_, "function", FunctionCall(name, "".join(arguments)))
            for id_, name, arguments in answer.calls.values()
        ]
        message = AssistantMessage(
            role="assistant",
            content=text if text or not calls else None,
            reasoning_content="".join(answer.reasoning) or None,
            tool_calls=None if self._as_functions else calls or None,
            function_call=calls[0].function if self._as_functions and calls else None,
        )
        logprobs = ChatLogprobs(answer.tokens) if self._with_logprobs else None
        reason = _reason(answer.end.reason, self._as_functions)
        return ChatChoice(index, message, reason, logprobs, answer.end.why)


# A request to go on with a conversation, whichever protocol it came by: what it asks of an engine.


@dataclass(frozen=True, slots=True)
class ConversationEndpoint:
    """Most of a Plan: its protocol adds how the answer is written. `body`: the request as a chat."""

    body: ChatBody
    asked: GenerateRequest
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

    async def wish(self, lease: AsyncLease) -> GenerationSpec:
        prompt = self.asked.prompt
        assert isinstance(prompt, Messages)
        asked = [
            msgspec.structs.replace(self.asked, prompt=way)
            for way in await template_fallbacks(lease, prompt)
        ]
        return GenerationSpec([asked], self.body.parallel_tool_calls is False, self.loop_guard)


async def template_fallbacks(lease: AsyncLease, prompt: Messages) -> list[Messages]:
    """How to put the conversation to the model's template, best first; the others are for templates that
    refuse. A system message in the middle stays one only where the template shows all of them in their places:
    some show the last alone, some gather them at the beginning, which spoils what the cache holds."""
    replace = msgspec.structs.replace
    template_fallbacks = [prompt]
    if has_late_system(prompt.messages):
        shown = await asyncio.to_thread(_shows, lease.engine, prompt)
        template_fallbacks = [prompt] if shown else []
        template_fallbacks.append(replace(prompt, messages=late_as_users(prompt.messages)))
        template_fallbacks.append(replace(prompt, messages=hoisted(prompt.messages)))
    if with_one_voice(prompt.messages) != prompt.messages:
        template_fallbacks += [
            replace(way, messages=with_one_voice(way.messages)) for way in template_fallbacks
        ]
    if with_results_last(prompt.messages) != prompt.messages:
        template_fallbacks += [
            replace(way, messages=with_results_last(way.messages)) for way in template_fallbacks
        ]
    if any(message.role == "system" for message in prompt.messages):
        template_fallbacks.append(
            replace(prompt, messages=without_system(template_fallbacks[-1].messages))
        )
    if prompt.continue_last:
        template_fallbacks += [
            replace(way, thinking="off") for way in template_fallbacks if way.thinking != "off"
        ]
        template_fallbacks.append(replace(template_fallbacks[0], continue_last=False))
    return template_fallbacks


def _shows(engine: Engine, prompt: Messages) -> bool:
    """Whether the template shows each system message, behind what the user said before it. A server on another
    machine that shows nobody its prompts is trusted to."""
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


# POST /v1/chat/completions.


async def chat(request: Request) -> ASGIApp:
    """Validated here; answered by the Exchange."""
    config = service_of(request).config
    body = decode(await read_body(request, config.limits), ChatBody, config.limits)
    as_functions = bool(body.functions and not body.tools)
    if as_functions:
        body = with_tools(body)
    asked = chat_request(body, config.limits, client_of(request))
    return GenerationResponse(request, ChatEndpoint(body, asked, config.loop_guard, as_functions))


def with_tools(body: ChatBody) -> ChatBody:
    """The older words for tools as the newer ones: one call at a time, and no number to it."""
    choice = body.function_call
    return msgspec.structs.replace(
        body,
        tools=[ChatTool(function) for function in body.functions or ()],
        tool_choice=NamedToolChoice(choice) if isinstance(choice, NamedFunction) else choice,
        parallel_tool_calls=False,
    )


@dataclass(frozen=True, slots=True)
class ChatEndpoint(ConversationEndpoint):
    """See Plan. as_functions: a call is told in the older words too."""

    as_functions: bool = False

    def stream(self, lease: AsyncLease, wish: GenerationSpec) -> ChatStream:
        options = self.body.stream_options
        return ChatStream(
            frame=self._frame(lease, "chat.completion.chunk"),
            with_usage=bool(options and options.include_usage),
            with_timings=bool(self.body.timings),
            with_logprobs=bool(self.body.logprobs),
            as_functions=self.as_functions,
        )

    def whole(self, lease: AsyncLease, wish: GenerationSpec) -> ChatWhole:
        return ChatWhole(
            self._frame(lease, "chat.completion"),
            wish.choices,
            with_timings=bool(self.body.timings),
            with_logprobs=bool(self.body.logprobs),
            as_functions=self.as_functions,
        )

    def _frame(self, lease: AsyncLease, kind: str) -> ChunkHeader:
        model = self.body.model or lease.name
        return ChunkHeader(new_id("chatcmpl-"), kind, model, fingerprint(lease.info))
