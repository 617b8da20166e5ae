"""From a request of the Responses API to the chat that it is. What a chat means, and what of it is refused,
is decided once, for all protocols (server/asking.py)."""

import logging
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from localchat.server.errors import ApiError, bad_request
from localchat.server.openai.messages import engine_role, text_of
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
from localchat.server.openai_responses.protocol import (
    InputItem,
    ResponsesBody,
    ResponsesTool,
    ResponsesToolChoice,
    TextFormat,
)

log = logging.getLogger("localchat.server")

LOGPROBS: Final = "message.output_text.logprobs"


_OWN_NAMES: Final = {
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format.type": "text.format.type",
    "response_format": "text.format",
}
"""Fields of a chat, and what they are called here."""

CUSTOM: Final = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""A custom tool as the function that a model knows: its text is the one argument."""


class ToolName(NamedTuple):
    """Where a function stands: its name inside its namespace, empty where it has none. custom: it takes a
    text and no arguments."""

    name: str
    namespace: str = ""
    custom: bool = False


class ResponsesChat(NamedTuple):
    """The request as a chat. `places`: of its tools, by the one name that the model knows them by."""

    chat: ChatBody
    tool_names: Mapping[str, ToolName]


def as_chat(body: ResponsesBody) -> ResponsesChat:
    """Raises ApiError."""
    _refuse_memory(body)
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
    chat = ChatBody(
        model=body.model,
        messages=messages,
        tools=[tool for tool, _ in tools],
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body.text.format) if body.text and body.text.format else None,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        logprobs=logprobs,
        top_logprobs=body.top_logprobs if logprobs else None,
        stream=body.stream,
        seed=body.seed,
    )
    return ResponsesChat(chat, {_flat(place): place for _, place in tools})


def with_own_field_names(error: ApiError) -> ApiError:
    """What refuses the chat, with the field named as the client named it."""
    own = _OWN_NAMES.get(error.param or "")
    if own is None:
        return error
    message = error.message.replace(repr(error.param), repr(own))
    return bad_request(message, param=own, code=error.code)


def _refuse_memory(body: ResponsesBody) -> None:
    """Refuse what needs an answer of earlier: nothing is kept here."""
    if body.previous_response_id:
        shown = body.previous_response_id[:100]
        raise ApiError(
            400,
            "previous_response_not_found",
            f"Previous response with id {shown!r} not found: this server keeps none. Send the whole "
            "conversation as 'input'.",
            param="previous_response_id",
        )
    for name in ("conversation", "prompt"):
        if getattr(body, name) is not None:
            raise bad_request(f"The field {name!r} is not taken: nothing is kept here.", param=name)
    if body.background:
        raise bad_request("An answer in the background is not kept here.", param="background")


# ---------------------------------------------------------------------------- items


def _messages(given: str | list[InputItem] | None) -> list[ChatMessage]:
    if isinstance(given, str):
        return [ChatMessage("user", given)] if given else []
    turns = _MessageBuilder()
    for at, item in enumerate(given or ()):
        turns.take(item, f"input[{at}]")
    return turns.whole()


class _MessageBuilder:
    """Puts messages together again: reasoning, text and calls of one turn come as items of their own."""

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._turn: ChatMessage | None = None

    def whole(self) -> list[ChatMessage]:
        self._flush()
        return self._messages

    def take(self, item: InputItem, place: str) -> None:
        """Raises ApiError."""
        match item.type:
            case "message" | None if item.role == "assistant":
                self._said(text_of(item.content, f"{place}.content"))
            case "message" | None:
                role = engine_role(_required(item.role, f"{place}.role"), f"{place}.role")
                content = text_of(item.content, f"{place}.content")
                self._add(ChatMessage(role, content))
            case "reasoning":
                self._thought(item, place)
            case "function_call":
                arguments = _required(item.arguments, f"{place}.arguments")
                self._called(item, arguments, place)
            case "custom_tool_call":  # of an answer that another server gave
                text = _required(item.input, f"{place}.input")
                self._called(item, msgspec.json.encode({"input": text}).decode(), place)
            case "function_call_output" | "custom_tool_call_output":
                result = text_of(item.output, f"{place}.output")
                call = _required(item.call_id, f"{place}.call_id")
                self._add(ChatMessage("tool", result, tool_call_id=call))
            case "item_reference":
                raise bad_request(
                    "An item of an earlier answer is referred to, and this server keeps none: send it whole "
                    "(clients do with 'store': false).",
                    param=place,
                )
            case other:
                raise bad_request(
                    f"An item of type {other[:50]!r} cannot be read here; there are message, reasoning, "
                    "function_call and function_call_output.",
                    param=f"{place}.type",
                )

    def _add(self, message: ChatMessage) -> None:
        self._flush()
        self._messages.append(message)

    def _flush(self) -> None:
        if self._turn is not None:
            self._messages.append(self._turn)
            self._turn = None

    def _said(self, text: str) -> None:
        if self._turn is None or self._turn.content or self._turn.tool_calls:
            self._flush()
            self._turn = ChatMessage("assistant")
        self._turn = msgspec.structs.replace(self._turn, content=text)

    def _thought(self, item: InputItem, place: str) -> None:
        """Its text, or its summary; what is encrypted was so elsewhere, and says nothing here."""
        text = text_of(item.content, f"{place}.content")
        text = text or "\n\n".join(part.text or "" for part in item.summary or ())
        self._flush()
        if text:
            self._turn = ChatMessage("assistant", reasoning_content=text)

    def _called(self, item: InputItem, arguments: str, place: str) -> None:
        name = _flat(ToolName(_required(item.name, f"{place}.name"), item.namespace or ""))
        call = ToolCallParam(
            FunctionCallParam(name, arguments), _required(item.call_id, f"{place}.call_id")
        )
        turn = self._turn or ChatMessage("assistant")
        self._turn = msgspec.structs.replace(turn, tool_calls=[*(turn.tool_calls or ()), call])


def _required(value: str | None, place: str) -> str:
    if value is None:
        raise bad_request(
            f"The field {place!r} is required.", param=place, code="missing_required_parameter"
        )
    return value


# ---------------------------------------------------------------------------- tools and formats


def _flat(place: ToolName) -> str:
    """The one name by which the model knows a function."""
    return f"{place.namespace}__{place.name}" if place.namespace else place.name


def _tools(
    at: int, tool: ResponsesTool, namespace: str = ""
) -> Sequence[tuple[ChatTool, ToolName]]:
    """The functions of an entry. What other machines would run (searches, interpreters) is left out, as every
    such server does: clients send it always, whether they need it or not."""
    match tool.type:
        case "function":
            place = ToolName(_required(tool.name, f"tools[{at}].name"), namespace)
            function = FunctionDefinition(
                _flat(place), tool.description, tool.parameters, tool.strict
            )
            return [(ChatTool(function), place)]
        case "custom":
            place = ToolName(_required(tool.name, f"tools[{at}].name"), namespace, custom=True)
            return [(ChatTool(FunctionDefinition(_flat(place), _told(tool), CUSTOM)), place)]
        case "namespace" if not namespace:
            name = _required(tool.name, f"tools[{at}].name")
            return [pair for inner in tool.tools or () for pair in _tools(at, inner, name)]
    log.debug("a tool of type %.50r is left out: nobody here runs it", tool.type)
    return []


def _told(tool: ResponsesTool) -> str | None:
    """The description of a custom tool, with the grammar that its text must follow: whoever runs it refuses
    another."""
    grammar = (tool.format or {}).get("definition")
    if not isinstance(grammar, str):
        return tool.description
    syntax = str((tool.format or {}).get("syntax") or "")
    rule = f"The input must follow this {syntax} grammar:".replace("  ", " ")
    return "\n\n".join(part for part in (tool.description, f"{rule}\n{grammar}") if part)


def _choice(
    choice: str | ResponsesToolChoice | None,
) -> tuple[str | NamedToolChoice | None, Sequence[ToolName] | None]:
    """The choice as a chat has it, and the tools that it leaves; None: all."""
    if choice is None or isinstance(choice, str):
        return choice, None
    match choice.type:
        case "function" | "custom":
            return NamedToolChoice(NamedFunction(_flat(_named(choice, "tool_choice.name")))), None
        case "allowed_tools":
            allowed = [
                _named(tool, f"tool_choice.tools[{at}].name")
                for at, tool in enumerate(choice.tools or ())
                if tool.type in ("function", "custom")
            ]
            return choice.mode or "auto", allowed
    raise bad_request(
        f"A tool of type {choice.type[:50]!r} cannot be called here.", param="tool_choice.type"
    )


def _named(tool: ResponsesToolChoice, place: str) -> ToolName:
    return ToolName(_required(tool.name, place), tool.namespace or "", tool.type == "custom")


def _format(wanted: TextFormat) -> ResponseFormat:
    if wanted.type == "json_schema" and wanted.schema is None:
        raise bad_request(
            "The field 'text.format.schema' is required.",
            param="text.format.schema",
            code="missing_required_parameter",
        )
    return ResponseFormat(wanted.type, JsonSchemaFormat(wanted.schema, wanted.name, wanted.strict))
