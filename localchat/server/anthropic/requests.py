"""From a request of the Messages API to the chat that it is. What a chat means, and what of it is refused, is
decided once, for all protocols (server/asking.py)."""

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
from localchat.server.errors import ApiError, bad_request
from localchat.server.openai.protocol import (
    ChatBody,
    ChatMessage,
    ChatTool,
    FunctionCallParam,
    FunctionDefinition,
    JsonSchemaFormat,
    NamedFunction,
    NamedToolChoice,
    ResponseFormat,
    ToolCallParam,
)

_CHANGING: Final = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n*")
"""What Claude Code writes at the very beginning of its system prompt: another number with every request,
which says nothing to a model and would leave nothing of the prefix cache."""
_EFFORTS: Final = {each: each for each in ("low", "medium", "high", "xhigh")} | {"max": "xhigh"}
_FAILED: Final = "Error: "
"""Templates cannot say that a tool failed, so its result does."""


def as_chat(body: MessagesBody) -> ChatBody:
    """The request as a chat. Raises ApiError."""
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
    """The part of the request that becomes the prompt. Raises ApiError."""
    config = body.output_config
    form = (config.format if config else None) or body.output_format
    choice = body.tool_choice
    return ChatBody(
        model=body.model,
        messages=[*_system(body.system), *_messages(body.messages)],
        tools=_tools(body),
        tool_choice=_choice(choice) if choice else None,
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        chat_template_kwargs=_options(body),
        response_format=_format(form) if form else None,
    )


def _system(system: Content) -> list[ChatMessage]:
    blocks = [InputBlock("text", system)] if isinstance(system, str) else system or []
    texts = [_CHANGING.sub("", _text(block, f"system.{at}")) for at, block in enumerate(blocks)]
    text = "\n".join(text for text in texts if text)
    return [ChatMessage("system", text)] if text else []


def _messages(turns: list[InputMessage]) -> Iterator[ChatMessage]:
    for at, turn in enumerate(turns):
        if turn.role not in ("user", "assistant", "system"):
            raise bad_request(
                f"The role {turn.role[:50]!r} is not known; there are user, assistant and system.",
                param=f"messages.{at}.role",
            )
        if turn.content is None:
            raise ApiError(
                400, "missing_required_parameter", f"messages.{at}.content: this field is required."
            )
        place = f"messages.{at}.content"
        if isinstance(turn.content, str):
            yield ChatMessage(turn.role, turn.content)
        elif turn.role == "assistant":
            yield _said(turn.content, place)
        else:
            yield from _asked(turn.role, turn.content, place)


def _said(blocks: list[InputBlock], place: str) -> ChatMessage:
    """A message of the assistant: its parts in the places that chats have for them. What was encrypted
    elsewhere is left out."""
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
                name = _required(block.name, f"{place}.{at}.name")
                calls.append(ToolCallParam(FunctionCallParam(name, arguments), block.id))
            case _:
                texts.append(_text(block, f"{place}.{at}"))
    return ChatMessage(
        "assistant",
        "\n".join(texts),
        tool_calls=calls or None,
        reasoning_content="\n".join(thoughts) or None,
    )


def _asked(role: str, blocks: list[InputBlock], place: str) -> Iterator[ChatMessage]:
    """A message of the user: the results of tools are messages of their own, in the order they stand."""
    texts: list[str] = []
    for at, block in enumerate(blocks):
        if block.type != "tool_result":
            texts.append(_text(block, f"{place}.{at}"))
            continue
        if texts:
            yield ChatMessage(role, "\n".join(texts))
            texts = []
        result = _plain(block.content, f"{place}.{at}.content")
        yield ChatMessage(
            "tool",
            f"{_FAILED}{result}" if block.is_error else result,
            tool_call_id=_required(block.tool_use_id, f"{place}.{at}.tool_use_id"),
        )
    if texts or not blocks:
        yield ChatMessage(role, "\n".join(texts))


def _plain(content: Content, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_text(block, f"{place}.{at}") for at, block in enumerate(content))


def _text(block: InputBlock, place: str) -> str:
    """The text of a block. Raises ApiError for what is none."""
    if block.type == "text":
        return _required(block.text, f"{place}.text")
    if block.type == "tool_reference":
        name = _required(block.tool_name, f"{place}.tool_name")
        return f"The tool {name} can be called now."
    if block.type == "search_result":
        place_of = block.source if isinstance(block.source, str) else None
        found = _plain(block.content, f"{place}.content")
        return "\n".join(part for part in (block.title, place_of, found) if part)
    if block.type == "document" and isinstance(block.source, DocumentSource):
        text = _document(block.source, f"{place}.source.content")
        if text is not None:
            return "\n".join(part for part in (block.title, text) if part)
    raise bad_request(
        f"{place}: this model reads text only; a block of type {block.type[:50]!r} cannot be read.",
        param=place,
    )


def _document(source: DocumentSource, place: str) -> str | None:
    """Its text; None for what is a file or lies elsewhere."""
    match source.type:
        case "text":
            return source.data or ""
        case "content":
            return _plain(source.content, place)
    return None


def _required(value: str | None, place: str) -> str:
    if value is None:
        raise bad_request(
            f"{place}: this field is required.", param=place, code="missing_required_parameter"
        )
    return value


def _tools(body: CountTokensBody) -> list[ChatTool]:
    """The tools that the model is told of: those that wait to be found are left out until they are."""
    given = body.tools or []
    found: set[str | None] = set()
    if any(tool.defer_loading for tool in given):
        found = set(_found(body.messages))
    return [
        _tool(at, tool)
        for at, tool in enumerate(given)
        if not tool.defer_loading or tool.name in found
    ]


def _found(turns: list[InputMessage]) -> Iterator[str | None]:
    """Names of the tools that results of others refer to."""
    for turn in turns:
        for block in turn.content if isinstance(turn.content, list) else ():
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
        f"tool_choice: {choice.type[:50]!r} is not known; there are auto, any, tool and none.",
        param="tool_choice.type",
    )


def _options(body: CountTokensBody) -> dict[str, Any]:
    """What the template is told. `adaptive` and nothing at all leave it to the model's own default."""
    options: dict[str, Any] = {}
    thinking = body.thinking
    if thinking is not None:
        if thinking.type not in ("enabled", "disabled", "adaptive", "between_tools"):
            raise bad_request(
                f"thinking: {thinking.type[:50]!r} is not known; there are enabled, disabled and adaptive.",
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
                f"output_config.effort: {effort[:50]!r} is not known; there are {', '.join(_EFFORTS)}.",
                param="output_config.effort",
            )
        options["reasoning_effort"] = _EFFORTS[effort]
    return options


def _format(wanted: OutputFormat) -> ResponseFormat:
    return ResponseFormat(wanted.type, JsonSchemaFormat(wanted.schema))
