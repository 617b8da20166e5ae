"""Translates requests of Ollama's API to chats and prompts, which openai/requests.py validates."""

from typing import Any

import msgspec

from localchat.engine.request import GenerateRequest, Infill, Prompt, TextPrompt
from localchat.server.config import ServerLimits
from localchat.server.errors import bad_request
from localchat.server.ollama.protocol import (
    AnswerBody,
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
    JsonSchemaFormat,
    ResponseFormat,
    ToolCallParam,
)
from localchat.server.openai.requests import (
    CHAT,
    INFILL,
    Client,
    answer_tokens,
    chat_request,
    checked_logprobs,
    generation,
)
from localchat.server.openai.structure import with_format_field

_NO_OPTIONS = OllamaOptions()


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
