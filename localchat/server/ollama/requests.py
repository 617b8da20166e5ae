"""Translates requests of Ollama's API to chats and prompts, which openai/requests.py validates."""

import logging
import math
import re
from typing import Any, Final

import msgspec

from localchat.engine.request import GenerateRequest, Infill, Prompt, TextPrompt
from localchat.pool.entry import NEVER
from localchat.server.chat.options import (
    CHAT,
    INFILL,
    Client,
    answer_tokens,
    checked_logprobs,
    generation,
)
from localchat.server.chat.request import chat_request
from localchat.server.chat.structure import JsonSchemaFormat, ResponseFormat, with_format_field
from localchat.server.config import ServerLimits
from localchat.server.errors import ApiError, bad_request
from localchat.server.ollama.protocol import (
    AnswerBody,
    KeepAlive,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaMessage,
    OllamaOptions,
)
from localchat.server.openai.protocol import (
    ChatBody,
    ChatMessage,
    ChatTool,
    FunctionCallParam,
    ToolCallParam,
)

log = logging.getLogger("localchat.server")

CONTEXT_TOKENS: Final = b"x-localchat-context-tokens"
"""Header with the context of a model that was loaded with a shorter one than the request asks for."""
_NO_OPTIONS = OllamaOptions()
_UNITS_S: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_NUMBER: Final = r"\d+(?:\.\d*)?|\.\d+"
_DURATION: Final = re.compile(rf"([-+]?)((?:(?:{_NUMBER})(?:h|ms|m|s|us|µs|ns))+|(?:{_NUMBER}))")
_TIME: Final = re.compile(rf"({_NUMBER})(h|ms|m|s|us|µs|ns)")
_LONGEST_S: Final = 10 * 365 * 86_400.0
_MOST_DIGITS: Final = 64


def as_chat(body: OllamaChatBody) -> ChatBody:
    """A chat with messages. Raises ApiError."""
    messages = [_message(at, message) for at, message in enumerate(body.messages or ())]
    tools = _tools(body.tools) if body.tools else None
    return msgspec.structs.replace(_body(body), messages=messages, tools=tools)


def as_generation(
    body: OllamaGenerateBody, limits: ServerLimits, client: Client
) -> tuple[ChatBody, GenerateRequest]:
    """A prompt, as the chat and the request that it makes. Raises ApiError."""
    _refuse_images(body.images, "images")
    if body.template:
        raise bad_request(
            "The field 'template' is not supported: the model's own template is used; 'raw': true uses none.",
            param="template",
        )
    chat = _body(body)
    prompt: Prompt
    if body.suffix:
        prompt = Infill(body.prompt or "", body.suffix)
    elif body.raw:
        prompt = TextPrompt(body.prompt or "", special=True)
    else:
        system = [ChatMessage("system", body.system)] if body.system else []
        messages = [*system, ChatMessage("user", body.prompt)]
        chat = msgspec.structs.replace(chat, messages=messages)
        return chat, engine_request(chat, limits, client)
    request = generation(
        chat,
        prompt,
        limits,
        client=client,
        max_tokens=answer_tokens(
            {} if chat.n_predict is None else {"num_predict": chat.n_predict}, limits, least=0
        ),
        logprobs=checked_logprobs(chat.top_logprobs or 0, "top_logprobs")
        if chat.logprobs
        else None,
        priority=INFILL if isinstance(prompt, Infill) else CHAT,
    )
    return chat, with_format_field(request, "format")


def engine_request(chat: ChatBody, limits: ServerLimits, client: Client) -> GenerateRequest:
    """The engine request of a translated chat. Raises ApiError."""
    return with_format_field(chat_request(chat, limits, client), "format")


def keep_alive_s(given: KeepAlive) -> float | None:
    """Seconds as EnginePool's `keep_alive_s`; None if none are given. Raises ApiError."""
    seconds = _seconds(given) if isinstance(given, str) else given
    if seconds is None:
        return None
    if not math.isfinite(seconds):
        raise _no_duration(str(given))
    return NEVER if seconds < 0 or seconds > _LONGEST_S else seconds


def _seconds(given: str) -> float | None:
    if not given:
        return None
    found = _DURATION.fullmatch(given) if len(given) <= _MOST_DIGITS else None
    if found is None:
        raise _no_duration(given)
    times = _TIME.findall(found[2])
    seconds = sum(float(number) * _UNITS_S[unit] for number, unit in times)
    return (-1.0 if found[1] == "-" else 1.0) * (seconds if times else float(found[2]))


def _no_duration(given: str) -> ApiError:
    return bad_request(
        f"The field 'keep_alive' is {given[:50]!r}; it must be a number of seconds or a time such as "
        "'5m' or '1h30m'; -1 keeps the model loaded, 0 unloads it.",
        param="keep_alive",
    )


def context_headers(
    options: OllamaOptions | None, context_tokens: int
) -> tuple[tuple[bytes, bytes], ...]:
    """The header of an answer with less context than the options ask for."""
    wanted = options.num_ctx if options is not None else None
    if wanted is None or wanted <= context_tokens:
        return ()
    log.warning(
        "num_ctx %d is more than the context of %d tokens with which the model is loaded; serve "
        "--ctx sets it",
        wanted,
        context_tokens,
    )
    return ((CONTEXT_TOKENS, str(context_tokens).encode()),)


def _body(body: AnswerBody) -> ChatBody:
    """Fields that chats and prompts share, as a chat without messages."""
    options = body.options or _NO_OPTIONS
    limit = options.num_predict
    return ChatBody(
        model=body.model,
        messages=[],
        stream=body.stream is not False,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        typical_p=options.typical_p,
        repeat_penalty=options.repeat_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        seed=options.seed,
        stop=options.stop,
        n_predict=limit if limit is not None and limit >= 0 else None,
        response_format=_format(body.format),
        enable_thinking=body.think if isinstance(body.think, bool) else None,
        reasoning_effort=body.think if isinstance(body.think, str) and body.think else None,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
    )


def _format(given: str | dict[str, Any] | None) -> ResponseFormat | None:
    if not given:
        return None
    if isinstance(given, dict):
        return ResponseFormat("json_schema", JsonSchemaFormat(given))
    if given == "json":
        return ResponseFormat("json_object")
    raise bad_request(
        f"The format {given[:50]!r} is unknown; use json or a JSON schema.", param="format"
    )


def _message(at: int, message: OllamaMessage) -> ChatMessage:
    _refuse_images(message.images, f"messages[{at}].images")
    calls = [
        ToolCallParam(FunctionCallParam(call.function.name, call.function.arguments), call.id)
        for call in message.tool_calls or ()
    ]
    return ChatMessage(
        message.role,
        message.content,
        name=message.tool_name,
        tool_calls=calls or None,
        tool_call_id=message.tool_call_id,
        reasoning_content=message.thinking,
    )


def _tools(given: list[dict[str, Any]]) -> list[ChatTool]:
    try:
        return msgspec.convert(given, list[ChatTool])
    except msgspec.ValidationError as error:
        raise bad_request(
            f"The tools cannot be read: {error}.".replace("`", ""),
            param="tools",
            code="invalid_type",
        ) from error


def _refuse_images(images: list[Any] | None, param: str) -> None:
    if images:
        raise bad_request("This model reads text only; images cannot be read.", param=param)
