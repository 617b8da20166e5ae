"""Translates requests of Ollama's API to ChatRequest, and prompts to requests of the engine."""

import logging
import math
import re
from dataclasses import replace
from typing import Any, Final

from localchat.engine.request import (
    Attachment,
    GenerateRequest,
    Infill,
    Message,
    TextPrompt,
)
from localchat.pool.entry import NEVER
from localchat.server.chat.media import MediaReader
from localchat.server.chat.messages import called_tools, engine_role
from localchat.server.chat.options import Client, GenerationFields
from localchat.server.chat.request import EFFORTS, ChatRequest, engine_request
from localchat.server.chat.structure import ResponseFormat, TokenFields
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

log = logging.getLogger("localchat.server")

CONTEXT_TOKENS: Final = b"x-localchat-context-tokens"
"""Header with the context in tokens, if it is shorter than requested."""
_UNITS_S: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_NUMBER: Final = r"\d+(?:\.\d*)?|\.\d+"
_DURATION: Final = re.compile(rf"([-+]?)((?:(?:{_NUMBER})(?:h|ms|m|s|us|µs|ns))+|(?:{_NUMBER}))")
_TIME: Final = re.compile(rf"({_NUMBER})(h|ms|m|s|us|µs|ns)")
_MAX_S: Final = 10 * 365 * 86_400.0
_MAX_LENGTH: Final = 64


def as_chat(body: OllamaChatBody, media: MediaReader) -> ChatRequest:
    """Translate a chat. Raises ApiError."""
    messages = [
        _message(message, f"messages[{index}]", media)
        for index, message in enumerate(body.messages or ())
    ]
    return replace(_chat_options(body), messages=messages, tools=body.tools or ())


def as_generation(
    body: OllamaGenerateBody, limits: ServerLimits, client: Client, media: MediaReader
) -> tuple[ChatRequest, GenerateRequest]:
    """Translate a prompt. Returns its options, and the request for the engine. Raises ApiError."""
    if body.template:
        raise bad_request(
            "The field 'template' is not supported: the model's own template is used; 'raw': true uses none.",
            param="template",
        )
    chat = _chat_options(body)
    prompt: Infill | TextPrompt | None = None
    if body.images and (body.suffix or body.raw):
        raise bad_request(
            "Images need the model's template, without 'suffix' or 'raw'.", param="images"
        )
    if body.suffix:
        prompt = Infill(body.prompt or "", body.suffix)
    elif body.raw:
        prompt = TextPrompt(body.prompt or "", special=True)
    else:
        images = _images(body.images, "images", media)
        messages = [Message("user", body.prompt or "", attachments=images)]
        if body.system:
            messages.insert(0, Message("system", body.system))
        chat = replace(chat, messages=messages)
    return chat, engine_request(chat, limits, client, prompt)


def keep_alive_s(value: KeepAlive) -> float | None:
    """Return seconds as EnginePool's `keep_alive_s`, None if the client sends none. Raises ApiError."""
    seconds = _seconds(value) if isinstance(value, str) else value
    if seconds is None:
        return None
    if not math.isfinite(seconds):
        raise _invalid_duration(str(value))
    if seconds < 0 or seconds > _MAX_S:
        return NEVER
    return seconds


def _seconds(text: str) -> float | None:
    if not text:
        return None
    match = _DURATION.fullmatch(text)
    if match is None or len(text) > _MAX_LENGTH:
        raise _invalid_duration(text)
    sign = -1.0 if match[1] == "-" else 1.0
    times = _TIME.findall(match[2])
    if not times:
        return sign * float(match[2])
    return sign * sum(float(number) * _UNITS_S[unit] for number, unit in times)


def _invalid_duration(text: str) -> ApiError:
    return bad_request(
        "The field 'keep_alive' must be a number of seconds or a time such as '5m' or '1h30m'; got "
        f"{text[:50]!r}. -1 keeps the model loaded, 0 unloads it.",
        param="keep_alive",
    )


def context_headers(
    options: OllamaOptions | None, context_tokens: int
) -> tuple[tuple[bytes, bytes], ...]:
    """Return the header of an answer with less context than the options request."""
    requested = (options or OllamaOptions()).num_ctx
    if requested is None or requested <= context_tokens:
        return ()
    log.warning(
        "num_ctx %d is more than the context of %d tokens with which the model is loaded; serve "
        "--ctx sets it",
        requested,
        context_tokens,
    )
    return ((CONTEXT_TOKENS, str(context_tokens).encode()),)


def _chat_options(body: AnswerBody) -> ChatRequest:
    """Translate the fields that chats and prompts share."""
    options = body.options or OllamaOptions()
    limit = options.num_predict
    # In Ollama, 0 means no limit as well.
    if limit is not None and limit <= 0:
        limit = None
    shared = {name: getattr(options, name) for name in TokenFields.__struct_fields__}
    fields = GenerationFields(
        **shared,
        model=body.model,
        stream=body.stream is not False,
        seed=options.seed,
        stop=options.stop,
        response_format=_response_format(body.format),
    )
    template_options: dict[str, bool] = {}
    effort = None
    if isinstance(body.think, bool):
        template_options["enable_thinking"] = body.think
    elif body.think and body.think not in (*EFFORTS, "max"):
        efforts = ", ".join(EFFORTS)
        raise bad_request(
            f"The field 'think' must be true, false or one of {efforts}; got {body.think[:50]!r}.",
            param="think",
        )
    else:
        effort = body.think
    return ChatRequest(
        fields=fields,
        template_options=template_options,
        reasoning_effort=effort,
        max_tokens={"n_predict": limit},
        logprobs=bool(body.logprobs),
        top_logprobs=body.top_logprobs,
        format_field="format",
    )


def _response_format(value: str | dict[str, Any] | None) -> ResponseFormat | None:
    if not value:
        return None
    if isinstance(value, dict):
        return ResponseFormat(type="json_schema", schema=value)
    if value == "json":
        return ResponseFormat(type="json_object")
    raise bad_request(
        f"The format {value[:50]!r} is unknown; use json or a JSON schema.", param="format"
    )


def _message(message: OllamaMessage, path: str, media: MediaReader) -> Message:
    return Message(
        engine_role(message.role, f"{path}.role"),
        message.content or "",
        message.thinking or "",
        called_tools(message.tool_calls),
        message.tool_call_id or "",
        message.tool_name or "",
        _images(message.images, f"{path}.images", media),
    )


def _images(images: list[str] | None, param: str, media: MediaReader) -> tuple[Attachment, ...]:
    """Return pictures and recordings, which come before the text as in Ollama."""
    return tuple(
        media.media_from_base64(image, f"{param}[{index}]")
        for index, image in enumerate(images or ())
    )
