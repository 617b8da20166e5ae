"""Translates requests of the Messages API to ChatRequest."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import msgspec

from localchat.engine.attachments import join_parts, prepend_text
from localchat.engine.request import Attachment, CalledTool, Message
from localchat.server.anthropic.protocol import (
    Content,
    ContentSource,
    CountTokensBody,
    InputBlock,
    InputMessage,
    MessagesBody,
    MessagesTool,
    OutputConfig,
    ToolChoice,
)
from localchat.server.chat import tools as chat_tools
from localchat.server.chat.media import MediaReader
from localchat.server.chat.options import GenerationFields
from localchat.server.chat.request import ChatRequest
from localchat.server.chat.structure import ResponseFormat, answer_fields
from localchat.server.chat.tools import ChatTool, FunctionDefinition
from localchat.server.errors import bad_request, missing_field, required

_BILLING_HEADER: Final = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n*")
"""First line of Claude Code's system prompt. It changes with every request, means nothing to a model and would
invalidate the whole prefix cache."""
_EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
_ERROR_PREFIX: Final = "Error: "
"""Start of the result of a tool that failed: chat templates cannot express the failure."""


def as_chat(body: MessagesBody, media: MediaReader) -> ChatRequest:
    """Translate a request for an answer. Raises ApiError."""
    chat = prompt_as_chat(body, media)
    fields = msgspec.structs.replace(
        chat.fields,
        stream=body.stream,
        stop=body.stop_sequences,
        seed=body.seed,
    )
    max_tokens = {"max_tokens": body.max_tokens}
    # 0 fills the cache before the first question, as in Anthropic's API.
    return replace(chat, fields=fields, max_tokens=max_tokens, min_answer_tokens=0)


def prompt_as_chat(body: CountTokensBody, media: MediaReader) -> ChatRequest:
    """Translate the part of a request that makes up the prompt. Raises ApiError."""
    config = body.output_config or OutputConfig()
    format_ = config.format or body.output_format
    structure = answer_fields(body)
    if format_ is not None:
        structure["response_format"] = ResponseFormat.of(format_)
    return ChatRequest(
        fields=GenerationFields(**structure, model=body.model),
        messages=[*_system(body.system, media), *_messages(body.messages, media)],
        tools=_tools(body),
        tool_choice=_tool_choice(body.tool_choice),
        single_call=bool(body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        template_options=_template_options(body),
        format_field="output_config.format",
    )


def _system(system: Content, media: MediaReader) -> list[Message]:
    if isinstance(system, str):
        system = [InputBlock("text", system)]
    parts = _parts(system, "system", media)
    texts = [_BILLING_HEADER.sub("", part) for part in parts if isinstance(part, str)]
    if len(texts) < len(parts):
        raise bad_request("system can only have text.", param="system")
    text = "\n".join(filter(None, texts))
    if not text:
        return []
    return [Message("system", text)]


def _messages(messages: list[InputMessage], media: MediaReader) -> Iterator[Message]:
    for index, message in enumerate(messages):
        if message.role not in ("user", "assistant", "system"):
            raise bad_request(
                f"The role {message.role[:50]!r} is unknown; the choices are user, assistant and system.",
                param=f"messages.{index}.role",
            )
        path = f"messages.{index}.content"
        if message.content is None:
            raise missing_field(path)
        if isinstance(message.content, str):
            yield Message(message.role, message.content)
        elif message.role == "assistant":
            yield _assistant_message(message.content, path, media)
        else:
            yield from _user_messages(message.role, message.content, path, media)


def _assistant_message(blocks: list[InputBlock], path: str, media: MediaReader) -> Message:
    """Collect the text, reasoning and calls of an answer. Encrypted reasoning is left out."""
    parts: list[str | Attachment] = []
    thoughts: list[str] = []
    calls: list[CalledTool] = []
    for index, block in enumerate(blocks):
        match block.type:
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass
            case "tool_use":
                arguments = msgspec.json.encode(block.input or {}).decode()
                name = required(block.name, f"{path}.{index}.name")
                calls.append(CalledTool(name, arguments, block.id or ""))
            case _:
                parts.append(_part(block, f"{path}.{index}", media))
    content = join_parts(parts)
    return Message(
        "assistant",
        content.text,
        "\n".join(thoughts),
        tuple(calls),
        attachments=content.attachments,
    )


def _user_messages(
    role: str, blocks: list[InputBlock], path: str, media: MediaReader
) -> Iterator[Message]:
    """Yield the messages of a user's turn. Tool results become messages of their own, in their order."""
    parts: list[str | Attachment] = []
    for index, block in enumerate(blocks):
        if block.type != "tool_result":
            parts.append(_part(block, f"{path}.{index}", media))
            continue
        if parts:
            yield _content_message(role, parts)
            parts = []
        result = _parts(block.content, f"{path}.{index}.content", media)
        call = required(block.tool_use_id, f"{path}.{index}.tool_use_id")
        message = msgspec.structs.replace(_content_message("tool", result), tool_call_id=call)
        yield prepend_text(message, _ERROR_PREFIX) if block.is_error else message
    if parts or not blocks:
        yield _content_message(role, parts)


def _content_message(role: str, parts: list[str | Attachment]) -> Message:
    content = join_parts(parts)
    return Message(role, content.text, attachments=content.attachments)


def _parts(content: Content, path: str, media: MediaReader) -> list[str | Attachment]:
    if content is None or isinstance(content, str):
        return [content or ""]
    return [_part(block, f"{path}.{index}", media) for index, block in enumerate(content)]


def _plain_text(content: Content, path: str, media: MediaReader) -> str:
    """Return the text of blocks that cannot have media. Raises ApiError."""
    text, attachments = join_parts(_parts(content, path, media))
    if attachments:
        raise bad_request(f"{path} can only have text.", param=path)
    return text


def _part(block: InputBlock, path: str, media: MediaReader) -> str | Attachment:
    """Return the text or the picture of a block. Raises ApiError for another block."""
    match block.type:
        case "text":
            return required(block.text, f"{path}.text")
        case "tool_reference":
            name = required(block.tool_name, f"{path}.tool_name")
            return f"The tool {name} can be called now."
        case "search_result":
            texts = [block.title, _plain_text(block.content, f"{path}.content", media)]
            if isinstance(block.source, str):
                texts.insert(1, block.source)
            return "\n".join(filter(None, texts))
        case "image" if isinstance(block.source, ContentSource):
            return media.media(_source_data(block.source, path, media), path, kind="image")
        case "document" if isinstance(block.source, ContentSource):
            return _document(block, block.source, path, media)
    raise bad_request(
        f"{path}: a block of type {block.type[:50]!r} cannot be read here.", param=path
    )


def _document(
    block: InputBlock, source: ContentSource, path: str, media: MediaReader
) -> str | Attachment:
    """Return a document after its context. A picture has none. Raises ApiError."""
    title = block.title or ""
    match source.type:
        case "text":
            document = source.data or ""
        case "content":
            document = _plain_text(source.content, f"{path}.source.content", media)
        case _:
            file = media.file(_source_data(source, path, media), title, path)
            if isinstance(file, Attachment):
                return file
            title = ""  # the text of a file has its name
            document = file
    return "\n".join(filter(None, (block.context, title, document)))


def _source_data(source: ContentSource, path: str, media: MediaReader) -> bytes:
    """Return the bytes of a picture or a document. Raises ApiError."""
    match source.type:
        case "base64":
            return media.data_from_base64(source.data, f"{path}.source.data")
        case "url":
            return media.data_from_url(source.url, f"{path}.source.url")
        case "file":
            raise bad_request(
                f"{path}: this server stores no files; send the content as base64.", param=path
            )
    raise bad_request(
        f"{path}: a source of type {source.type[:50]!r} is unknown; the choices are base64 and url.",
        param=f"{path}.source.type",
    )


def _tools(body: CountTokensBody) -> list[ChatTool]:
    """Convert the tools that the model sees. A deferred tool appears once a tool result refers to it."""
    tools = body.tools or []
    referenced: set[str | None] = set()
    if any(tool.defer_loading for tool in tools):
        referenced = set(_referenced_tools(body.messages))
    return [
        _tool(index, tool)
        for index, tool in enumerate(tools)
        if not tool.defer_loading or tool.name in referenced
    ]


def _referenced_tools(messages: list[InputMessage]) -> Iterator[str | None]:
    """Yield the names of the tools that tool results refer to."""
    for message in messages:
        for block in _blocks(message.content):
            for inner in _blocks(block.content):
                if inner.type == "tool_reference":
                    yield inner.tool_name


def _blocks(content: Content) -> list[InputBlock]:
    return content if isinstance(content, list) else []


def _tool(index: int, tool: MessagesTool) -> ChatTool:
    if tool.type not in (None, "custom"):
        raise bad_request(
            f"tools.{index}: a tool of type {tool.type[:50]!r} cannot be run here; describe it with a name and "
            "an input_schema.",
            param=f"tools.{index}",
        )
    return ChatTool(FunctionDefinition(tool.name, tool.description, tool.input_schema, tool.strict))


def _tool_choice(choice: ToolChoice | None) -> chat_tools.ToolChoice:
    if choice is None:
        return chat_tools.ToolChoice()
    match choice.type:
        case "auto" | "none" | "any":
            return chat_tools.ToolChoice(choice.type)
        case "tool":
            name = required(choice.name, "tool_choice.name")
            return chat_tools.ToolChoice(name=name, param="tool_choice.function.name")
    raise bad_request(
        f"tool_choice: {choice.type[:50]!r} is unknown; the choices are auto, any, tool and none.",
        param="tool_choice.type",
    )


def _template_options(body: CountTokensBody) -> dict[str, Any]:
    """Return the template options. Thinking of type `adaptive` leaves the choice to the model's default."""
    options: dict[str, Any] = {}
    thinking = body.thinking
    if thinking is not None:
        if thinking.type not in ("enabled", "disabled", "adaptive", "between_tools"):
            raise bad_request(
                f"thinking: {thinking.type[:50]!r} is unknown; the choices are enabled, disabled and adaptive.",
                param="thinking.type",
            )
        if thinking.type in ("enabled", "disabled"):
            options["enable_thinking"] = thinking.type == "enabled"
        if thinking.budget_tokens is not None:
            options["thinking_budget"] = thinking.budget_tokens
    effort = (body.output_config or OutputConfig()).effort
    if effort is not None:
        if effort not in _EFFORTS:
            raise bad_request(
                f"output_config.effort: {effort[:50]!r} is unknown; the choices are {', '.join(_EFFORTS)}.",
                param="output_config.effort",
            )
        if effort == "max":
            effort = "xhigh"
        options["reasoning_effort"] = effort
    return options
