"""Translates a Responses API request to a chat, which openai/requests.py validates for all protocols."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from localchat.server.chat.custom_tools import PARAMETERS, arguments_of, description_of
from localchat.server.chat.messages import engine_role, text_of
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
from localchat.server.openai_responses.protocol import (
    InputItem,
    ResponsesBody,
    ResponsesTool,
    ResponsesToolChoice,
    TextFormat,
)

_CALLED: Final = ("function", "custom", "namespace")
"""Types of tools that a client runs."""
LOGPROBS: Final = "message.output_text.logprobs"


_FIELD_NAMES: Final = {
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format.type": "text.format.type",
    "response_format": "text.format",
}
"""Names of a chat's fields in this protocol."""


class ToolName(NamedTuple):
    """A tool as the client names it."""

    name: str
    namespace: str = ""
    """Empty: none."""
    custom: bool = False
    """It takes a text instead of arguments."""


class ResponsesChat(NamedTuple):
    """A request as a chat. tool_names: the client's names of its tools, by the names that the model sees."""

    chat: ChatBody
    tool_names: Mapping[str, ToolName]
    ignored: tuple[str, ...] = ()
    """Tools that are left out, because they run on other servers."""


def as_chat(body: ResponsesBody) -> ResponsesChat:
    """The request as a chat. Raises ApiError."""
    _refuse_stored_state(body)
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise bad_request(
            f"The field 'max_output_tokens' is {body.max_output_tokens}; it must be positive.",
            param="max_output_tokens",
        )
    tools = [pair for at, tool in enumerate(body.tools or ()) for pair in _tools(at, tool)]
    choice, allowed = _choice(body.tool_choice)
    if allowed is not None:
        tools = [pair for pair in tools if pair[1] in allowed]
    logprobs = LOGPROBS in (body.include or ())
    messages = [ChatMessage("system", body.instructions)] if body.instructions else []
    messages += _messages(body.input)
    if not messages:
        raise bad_request(
            "The field 'input' is empty: there is nothing to answer.",
            param="input",
            code="missing_required_parameter",
        )
    structure = structure_of(body)
    if body.text and body.text.format:
        structure["response_format"] = _format(body.text.format)
    chat = ChatBody(
        **structure,
        model=body.model,
        messages=messages,
        tools=[tool for tool, _ in tools],
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        thinking_budget=body.reasoning.max_tokens if body.reasoning else None,
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        logprobs=logprobs,
        top_logprobs=body.top_logprobs if logprobs else None,
        stream=body.stream,
        return_progress=body.return_progress,
        seed=body.seed,
    )
    names = {_model_name(name): name for _, name in tools}
    return ResponsesChat(chat, names, _left_out(body.tools or ()))


def with_own_field_names(error: ApiError) -> ApiError:
    """A refusal of the chat, with the field named as in this protocol."""
    own = _FIELD_NAMES.get(error.param or "")
    if own is None:
        return error
    message = error.message.replace(repr(error.param), repr(own))
    return bad_request(message, param=own, code=error.code)


def _refuse_stored_state(body: ResponsesBody) -> None:
    """Refuse what needs a stored response: this server stores none."""
    if body.previous_response_id:
        shown = body.previous_response_id[:100]
        raise ApiError(
            400,
            "previous_response_not_found",
            f"Previous response with id {shown!r} not found: this server stores none. Send the whole "
            "conversation as 'input'.",
            param="previous_response_id",
        )
    for name in ("conversation", "prompt"):
        if getattr(body, name) is not None:
            raise bad_request(
                f"The field {name!r} is not supported: this server stores nothing.", param=name
            )
    if body.background:
        raise bad_request("Background responses are not supported.", param="background")


# ---------------------------------------------------------------------------- items


def _messages(given: str | list[InputItem] | None) -> list[ChatMessage]:
    if isinstance(given, str):
        return [ChatMessage("user", given)] if given else []
    builder = _MessageBuilder()
    for at, item in enumerate(given or ()):
        builder.add(item, f"input[{at}]")
    return builder.messages()


class _MessageBuilder:
    """Joins items to messages.

    Reasoning, text and calls of one assistant message arrive as separate items.
    """

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._assistant: ChatMessage | None = None

    def messages(self) -> list[ChatMessage]:
        self._flush()
        return self._messages

    def add(self, item: InputItem, path: str) -> None:
        """Add an item. Raises ApiError."""
        match item.type:
            case "message" | None if item.role == "assistant":
                self._add_text(text_of(item.content, f"{path}.content", role="assistant"))
            case "message" | None:
                role = engine_role(_required(item.role, f"{path}.role"), f"{path}.role")
                content = text_of(item.content, f"{path}.content")
                self._append(ChatMessage(role, content))
            case "reasoning":
                self._add_reasoning(item, path)
            case "function_call":
                arguments = _required(item.arguments, f"{path}.arguments")
                self._add_call(item, arguments, path)
            case "custom_tool_call":  # from an answer of another server
                text = _required(item.input, f"{path}.input")
                self._add_call(item, arguments_of(text), path)
            case "function_call_output" | "custom_tool_call_output":
                result = text_of(item.output, f"{path}.output")
                call = _required(item.call_id, f"{path}.call_id")
                self._append(ChatMessage("tool", result, tool_call_id=call))
            case "item_reference":
                raise bad_request(
                    "The item refers to an earlier response, but this server stores none: send the whole item "
                    "(clients do so with 'store': false).",
                    param=path,
                )
            case other:
                raise bad_request(
                    f"An item of type {other[:50]!r} cannot be read here; there are message, reasoning, "
                    "function_call and function_call_output.",
                    param=f"{path}.type",
                )

    def _append(self, message: ChatMessage) -> None:
        self._flush()
        self._messages.append(message)

    def _flush(self) -> None:
        if self._assistant is not None:
            self._messages.append(self._assistant)
            self._assistant = None

    def _add_text(self, text: str) -> None:
        if self._assistant is None or self._assistant.content or self._assistant.tool_calls:
            self._flush()
            self._assistant = ChatMessage("assistant")
        self._assistant = msgspec.structs.replace(self._assistant, content=text)

    def _add_reasoning(self, item: InputItem, path: str) -> None:
        """Add the text of a reasoning item, or its summary. Encrypted reasoning is skipped."""
        text = text_of(item.content, f"{path}.content")
        text = text or "\n\n".join(part.text or "" for part in item.summary or ())
        self._flush()
        if text:
            self._assistant = ChatMessage("assistant", reasoning_content=text)

    def _add_call(self, item: InputItem, arguments: str, path: str) -> None:
        name = _model_name(ToolName(_required(item.name, f"{path}.name"), item.namespace or ""))
        call = ToolCallParam(
            FunctionCallParam(name, arguments), _required(item.call_id, f"{path}.call_id")
        )
        message = self._assistant or ChatMessage("assistant")
        self._assistant = msgspec.structs.replace(
            message, tool_calls=[*(message.tool_calls or ()), call]
        )


def _required(value: str | None, path: str) -> str:
    if value is None:
        raise bad_request(
            f"The field {path!r} is required.", param=path, code="missing_required_parameter"
        )
    return value


# ---------------------------------------------------------------------------- tools and formats


def _model_name(name: ToolName) -> str:
    """The one name by which the model knows a tool."""
    if name.namespace:
        return f"{name.namespace}__{name.name}"
    return name.name


def _tools(
    at: int, tool: ResponsesTool, namespace: str = ""
) -> Sequence[tuple[ChatTool, ToolName]]:
    """The functions of an entry. Tools that run on other servers (search, interpreters) are left out, as
    every such server does: clients send them always, even if they do not need them."""
    match tool.type:
        case "function":
            name = ToolName(_required(tool.name, f"tools[{at}].name"), namespace)
            function = FunctionDefinition(
                _model_name(name), tool.description, tool.parameters, tool.strict
            )
            return [(ChatTool(function), name)]
        case "custom":
            name = ToolName(_required(tool.name, f"tools[{at}].name"), namespace, custom=True)
            function = FunctionDefinition(
                _model_name(name), description_of(tool.description, tool.format), PARAMETERS
            )
            return [(ChatTool(function), name)]
        case "namespace" if not namespace:
            inner_namespace = _required(tool.name, f"tools[{at}].name")
            return [
                pair for inner in tool.tools or () for pair in _tools(at, inner, inner_namespace)
            ]
    return []


def _left_out(tools: Sequence[ResponsesTool]) -> tuple[str, ...]:
    """Types of the tools that do not run here, as names of ignored fields."""
    inner = [one for tool in tools if tool.type == "namespace" for one in tool.tools or ()]
    names = [f"tools.{tool.type}" for tool in (*tools, *inner) if tool.type not in _CALLED]
    return tuple(dict.fromkeys(names))


def _choice(
    choice: str | ResponsesToolChoice | None,
) -> tuple[str | NamedToolChoice | None, Sequence[ToolName] | None]:
    """The tool choice of a chat, and the tools that it leaves; None: all."""
    if choice is None or isinstance(choice, str):
        return choice, None
    match choice.type:
        case "function" | "custom":
            return NamedToolChoice(
                NamedFunction(_model_name(_tool_name(choice, "tool_choice.name")))
            ), None
        case "allowed_tools":
            allowed = [
                _tool_name(tool, f"tool_choice.tools[{at}].name")
                for at, tool in enumerate(choice.tools or ())
                if tool.type in ("function", "custom")
            ]
            return choice.mode or "auto", allowed
    raise bad_request(
        f"A tool of type {choice.type[:50]!r} cannot be called here.", param="tool_choice.type"
    )


def _tool_name(tool: ResponsesToolChoice, path: str) -> ToolName:
    return ToolName(_required(tool.name, path), tool.namespace or "", tool.type == "custom")


def _format(format_: TextFormat) -> ResponseFormat:
    if format_.type == "json_schema" and format_.schema is None:
        raise bad_request(
            "The field 'text.format.schema' is required.",
            param="text.format.schema",
            code="missing_required_parameter",
        )
    return ResponseFormat(
        format_.type, JsonSchemaFormat(format_.schema, format_.name, format_.strict)
    )
