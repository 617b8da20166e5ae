"""Translates a Messages API request to a chat, which openai/requests.py validates for all protocols."""

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from localchat.server.anthropic.protocol import (
    Content,
    CountTokensBody,
    DocumentSource,
    InputBlock,
    InputMessage,
    MessagesBody,
    MessagesTool,
    OutputFormat,
    ToolChoice,
)
from localchat.server.chat.structure import JsonSchemaFormat, ResponseFormat, structure_of
from localchat.server.errors import ApiError, bad_request
from localchat.server.openai.protocol import (
    ChatBody,
    ChatMessage,
    ChatTool,
    FunctionCallParam,
    FunctionDefinition,
    NamedFunction,
    NamedToolChoice,
    ToolCallParam,
)

_BILLING_HEADER: Final = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n*")
"""A line at the start of Claude Code's system prompt. It changes with every request, means nothing to a model
and would invalidate the whole prefix cache."""
_EFFORTS: Final = {each: each for each in ("low", "medium", "high", "xhigh")} | {"max": "xhigh"}
_ERROR_PREFIX: Final = "Error: "
"""Templates have no place for the failure of a tool, so its result starts with this."""


def as_chat(body: MessagesBody) -> ChatBody:
    """The whole request as a chat. Raises ApiError."""
    return msgspec.structs.replace(
        prompt_as_chat(body),
        max_tokens=body.max_tokens,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
    )


def prompt_as_chat(body: CountTokensBody) -> ChatBody:
    """The part of the request that makes up the prompt, as a chat. Raises ApiError."""
    config = body.output_config
    format_ = (config.format if config else None) or body.output_format
    choice = body.tool_choice
    structure = structure_of(body)
    if format_ is not None:
        structure["response_format"] = _format(format_)
    return ChatBody(
        **structure,
        model=body.model,
        messages=[*_system(body.system), *_messages(body.messages)],
        tools=_tools(body),
        tool_choice=_choice(choice) if choice else None,
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        chat_template_kwargs=_options(body),
    )


def _system(system: Content) -> list[ChatMessage]:
    blocks = [InputBlock("text", system)] if isinstance(system, str) else system or []
    texts = [
        _BILLING_HEADER.sub("", _text(block, f"system.{at}")) for at, block in enumerate(blocks)
    ]
    text = "\n".join(text for text in texts if text)
    return [ChatMessage("system", text)] if text else []


def _messages(messages: list[InputMessage]) -> Iterator[ChatMessage]:
    for at, message in enumerate(messages):
        if message.role not in ("user", "assistant", "system"):
            raise bad_request(
                f"The role {message.role[:50]!r} is unknown; the choices are user, assistant and system.",
                param=f"messages.{at}.role",
            )
        if message.content is None:
            raise ApiError(
                400, "missing_required_parameter", f"messages.{at}.content: this field is required."
            )
        path = f"messages.{at}.content"
        if isinstance(message.content, str):
            yield ChatMessage(message.role, message.content)
        elif message.role == "assistant":
            yield _assistant_message(message.content, path)
        else:
            yield from _user_messages(message.role, message.content, path)


def _assistant_message(blocks: list[InputBlock], path: str) -> ChatMessage:
    """A message of the assistant: text, reasoning and calls in the fields of a chat. Encrypted reasoning is
    left out."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCallParam] = []
    for at, block in enumerate(blocks):
        match block.type:
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass
            case "tool_use":
                arguments = msgspec.json.encode(block.input or {}).decode()
                name = _required(block.name, f"{path}.{at}.name")
                calls.append(ToolCallParam(FunctionCallParam(name, arguments), block.id))
            case _:
                texts.append(_text(block, f"{path}.{at}"))
    return ChatMessage(
        "assistant",
        "\n".join(texts),
        tool_calls=calls or None,
        reasoning_content="\n".join(thoughts) or None,
    )


def _user_messages(role: str, blocks: list[InputBlock], path: str) -> Iterator[ChatMessage]:
    """A message of the user. Tool results become messages of their own, in their order."""
    texts: list[str] = []
    for at, block in enumerate(blocks):
        if block.type != "tool_result":
            texts.append(_text(block, f"{path}.{at}"))
            continue
        if texts:
            yield ChatMessage(role, "\n".join(texts))
            texts = []
        result = _plain_text(block.content, f"{path}.{at}.content")
        yield ChatMessage(
            "tool",
            f"{_ERROR_PREFIX}{result}" if block.is_error else result,
            tool_call_id=_required(block.tool_use_id, f"{path}.{at}.tool_use_id"),
        )
    if texts or not blocks:
        yield ChatMessage(role, "\n".join(texts))


def _plain_text(content: Content, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_text(block, f"{path}.{at}") for at, block in enumerate(content))


def _text(block: InputBlock, path: str) -> str:
    """The text of a block. Raises ApiError for a block without text."""
    if block.type == "text":
        return _required(block.text, f"{path}.text")
    if block.type == "tool_reference":
        name = _required(block.tool_name, f"{path}.tool_name")
        return f"The tool {name} can be called now."
    if block.type == "search_result":
        source = block.source if isinstance(block.source, str) else None
        found = _plain_text(block.content, f"{path}.content")
        return "\n".join(part for part in (block.title, source, found) if part)
    if block.type == "document" and isinstance(block.source, DocumentSource):
        text = _document(block.source, f"{path}.source.content")
        if text is not None:
            return "\n".join(part for part in (block.title, text) if part)
    raise bad_request(
        f"{path}: this model reads text only; a block of type {block.type[:50]!r} cannot be read.",
        param=path,
    )


def _document(source: DocumentSource, path: str) -> str | None:
    """The text of a document; None for a file or a URL."""
    match source.type:
        case "text":
            return source.data or ""
        case "content":
            return _plain_text(source.content, path)
    return None


def _required(value: str | None, path: str) -> str:
    if value is None:
        raise bad_request(
            f"{path}: this field is required.", param=path, code="missing_required_parameter"
        )
    return value


def _tools(body: CountTokensBody) -> list[ChatTool]:
    """The tools that the model sees.

    Deferred tools are left out until a tool result has referred to them.
    """
    given = body.tools or []
    referenced: set[str | None] = set()
    if any(tool.defer_loading for tool in given):
        referenced = set(_referenced_tools(body.messages))
    return [
        _tool(at, tool)
        for at, tool in enumerate(given)
        if not tool.defer_loading or tool.name in referenced
    ]


def _referenced_tools(messages: list[InputMessage]) -> Iterator[str | None]:
    """Names of the tools that tool results refer to."""
    for message in messages:
        for block in message.content if isinstance(message.content, list) else ():
            for inner in block.content if isinstance(block.content, list) else ():
                if inner.type == "tool_reference":
                    yield inner.tool_name


def _tool(at: int, tool: MessagesTool) -> ChatTool:
    if tool.type not in (None, "custom"):
        raise bad_request(
            f"tools.{at}: a tool of type {tool.type[:50]!r} cannot be run here; describe it with a name and "
            "an input_schema.",
            param=f"tools.{at}",
        )
    return ChatTool(FunctionDefinition(tool.name, tool.description, tool.input_schema, tool.strict))


def _choice(choice: ToolChoice) -> str | NamedToolChoice:
    match choice.type:
        case "auto" | "none":
            return choice.type
        case "any":
            return "required"
        case "tool":
            name = _required(choice.name, "tool_choice.name")
            return NamedToolChoice(NamedFunction(name))
    raise bad_request(
        f"tool_choice: {choice.type[:50]!r} is unknown; the choices are auto, any, tool and none.",
        param="tool_choice.type",
    )


def _options(body: CountTokensBody) -> dict[str, Any]:
    """Template options. Thinking of type `adaptive`, or none at all, leaves the choice to the model's
    default."""
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
    if body.output_config is not None and body.output_config.effort is not None:
        effort = body.output_config.effort
        if effort not in _EFFORTS:
            raise bad_request(
                f"output_config.effort: {effort[:50]!r} is unknown; the choices are {', '.join(_EFFORTS)}.",
                param="output_config.effort",
            )
        options["reasoning_effort"] = _EFFORTS[effort]
    return options


def _format(format_: OutputFormat) -> ResponseFormat:
    return ResponseFormat(format_.type, JsonSchemaFormat(format_.schema, strict=format_.strict))
