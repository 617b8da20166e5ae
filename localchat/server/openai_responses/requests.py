"""Translates requests of the Responses API to ChatRequest."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from localchat.config.mcp_servers import tool_name
from localchat.engine.attachments import Content
from localchat.engine.request import CalledTool, Message
from localchat.server.chat.media import MediaReader
from localchat.server.chat.messages import content_of, engine_role, text_of
from localchat.server.chat.options import GenerationFields
from localchat.server.chat.request import ChatRequest
from localchat.server.chat.structure import ResponseFormat, answer_fields
from localchat.server.chat.tools import ChatTool, FunctionDefinition, ToolChoice
from localchat.server.errors import ApiError, bad_request, missing_field, required
from localchat.server.openai_responses.mcp import McpRequest, error_text
from localchat.server.openai_responses.protocol import (
    InputItem,
    ReasoningConfig,
    ResponsesBody,
    ResponsesTool,
    ResponsesToolChoice,
)

CALLABLE: Final = ("function", "namespace", "mcp")
"""Types of tools that a model can call here. The server runs those of `mcp`, and the client the others."""
_LOGPROBS: Final = "message.output_text.logprobs"
_FIELD_NAMES: Final = {
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format.type": "text.format.type",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
}
"""This protocol's names of ChatRequest's fields, for errors."""


class ToolName(NamedTuple):
    """A tool as the client names it."""

    name: str
    namespace: str = ""
    """Empty for a tool without a namespace."""

    @property
    def model_name(self) -> str:
        """The one name by which the model knows the tool."""
        if self.namespace:
            return f"{self.namespace}__{self.name}"
        return self.name


class ResponsesChat(NamedTuple):
    """A translated request."""

    chat: ChatRequest
    tool_names: Mapping[str, ToolName]
    """The client's names of its tools, by the names that the model sees."""
    mcp: McpRequest
    ignored: tuple[str, ...] = ()
    """Types of tools that are left out."""


def as_chat(body: ResponsesBody, media: MediaReader) -> ResponsesChat:
    """Translate a request. Raises ApiError."""
    _refuse_stored_state(body)
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise bad_request(
            f"The field 'max_output_tokens' must be positive; got {body.max_output_tokens}.",
            param="max_output_tokens",
        )
    tools = [named for index, tool in enumerate(body.tools or ()) for named in _tools(index, tool)]
    servers = [tool for tool in body.tools or () if tool.type == "mcp"]
    ignored = _ignored_tools(body.tools or ())
    if ignored and not tools and not servers and body.tool_choice != "none":
        # Clients that need a search get no invented answer. Codex also sends one, beside its functions.
        raise bad_request(
            f"None of the tools can be called here ({', '.join(ignored)}): describe functions, or name MCP "
            "servers that this server offers.",
            param="tools",
        )
    choice, allowed = _tool_choice(body.tool_choice)
    if allowed is not None:
        tools = [(tool, name) for tool, name in tools if name in allowed]
        servers = []
    logprobs = _LOGPROBS in (body.include or ())
    conversation = _conversation(body, media)
    messages = conversation.messages()
    if not messages:
        raise missing_field("input", "The field 'input' is empty: there is nothing to answer.")
    # The tools of the servers are not known yet.
    needs_server_tool = bool(servers) and choice.name is None and choice.mode == "required"
    if needs_server_tool:
        choice = ToolChoice("auto")
    reasoning = body.reasoning or ReasoningConfig()
    chat = ChatRequest(
        fields=_fields(body),
        messages=messages,
        tools=[tool for tool, _ in tools],
        tool_choice=choice,
        single_call=body.parallel_tool_calls is False,
        reasoning_effort=reasoning.effort,
        think_budgets=(reasoning.max_tokens,),
        max_tokens={"max_tokens": body.max_output_tokens},
        logprobs=logprobs,
        top_logprobs=body.top_logprobs if logprobs else None,
        format_field="text.format",
    )
    names = {name.model_name: name for _, name in tools}
    mcp = McpRequest(tuple(servers), frozenset(conversation.listed), needs_server_tool)
    return ResponsesChat(chat, names, mcp, ignored)


def _fields(body: ResponsesBody) -> GenerationFields:
    structure = answer_fields(body)
    if body.text and body.text.format:
        structure["response_format"] = ResponseFormat.of(body.text.format)
    return GenerationFields(**structure, model=body.model, stream=body.stream, seed=body.seed)


def with_own_field_names(error: ApiError) -> ApiError:
    """Return the error with its field named as in this protocol."""
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


def _conversation(body: ResponsesBody, media: MediaReader) -> "_MessageBuilder":
    builder = _MessageBuilder(media)
    if body.instructions:
        builder.append(Message("system", body.instructions))
    if isinstance(body.input, str) and body.input:
        builder.append(Message("user", body.input))
    elif body.input:
        for index, item in enumerate(body.input):
            builder.add(item, f"input[{index}]")
    return builder


class _MessageBuilder:
    """Joins items to messages: reasoning, text and calls of one answer arrive as separate items."""

    def __init__(self, media: MediaReader) -> None:
        self.listed: set[str] = set()
        """See McpRequest."""
        self._media = media
        self._messages: list[Message] = []
        self._assistant: Message | None = None

    def messages(self) -> list[Message]:
        self._flush()
        return self._messages

    def add(self, item: InputItem, path: str) -> None:
        """Add an item. Raises ApiError."""
        match item.type:
            case "message" | None if item.role == "assistant":
                self._add_content(
                    content_of(item.content, f"{path}.content", self._media, role="assistant")
                )
            case "message" | None:
                role = engine_role(required(item.role, f"{path}.role"), f"{path}.role")
                content = content_of(item.content, f"{path}.content", self._media)
                self.append(Message(role, content.text, attachments=content.attachments))
            case "reasoning":
                self._add_reasoning(item, path)
            case "function_call":
                self._add_call(item, path)
            case "function_call_output":
                result = content_of(item.output, f"{path}.output", self._media)
                call = required(item.call_id, f"{path}.call_id")
                self.append(
                    Message("tool", result.text, tool_call_id=call, attachments=result.attachments)
                )
            case "mcp_list_tools":
                self.listed.add(required(item.server_label, f"{path}.server_label"))
            case "mcp_call":
                self._add_mcp_call(item, path)
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

    def append(self, message: Message) -> None:
        """Add a complete message."""
        self._flush()
        self._messages.append(message)

    def _flush(self) -> None:
        if self._assistant is not None:
            self._messages.append(self._assistant)
            self._assistant = None

    def _add_content(self, content: Content) -> None:
        if self._assistant is None or self._assistant.content or self._assistant.tool_calls:
            self._flush()
            self._assistant = Message("assistant")
        self._assistant = msgspec.structs.replace(
            self._assistant, content=content.text, attachments=content.attachments
        )

    def _add_reasoning(self, item: InputItem, path: str) -> None:
        """Add the text of a reasoning item, or its summary. Encrypted reasoning is skipped."""
        text = text_of(item.content, f"{path}.content")
        text = text or "\n\n".join(part.text or "" for part in item.summary or ())
        self._flush()
        if text:
            self._assistant = Message("assistant", reasoning=text)

    def _add_call(self, item: InputItem, path: str) -> None:
        arguments = required(item.arguments, f"{path}.arguments")
        name = ToolName(required(item.name, f"{path}.name"), item.namespace or "")
        call = CalledTool(
            name.model_name, arguments or "{}", required(item.call_id, f"{path}.call_id")
        )
        message = self._assistant or Message("assistant")
        self._assistant = msgspec.structs.replace(message, tool_calls=(*message.tool_calls, call))

    def _add_mcp_call(self, item: InputItem, path: str) -> None:
        """Add a call that a server has run, with its result."""
        id_ = required(item.id, f"{path}.id")
        text = text_of(item.output, f"{path}.output")
        if item.error:
            text = f"Error: {error_text(item.error)}"
        name = tool_name(
            required(item.server_label, f"{path}.server_label"),
            required(item.name, f"{path}.name"),
        )
        self._add_call(InputItem(name=name, call_id=id_, arguments=item.arguments), path)
        self.append(Message("tool", text or "(no output)", tool_call_id=id_))


def _tools(
    index: int, tool: ResponsesTool, namespace: str = ""
) -> Sequence[tuple[ChatTool, ToolName]]:
    """Return the functions of an entry, with the client's names.

    Other tools are left out, such as a search on OpenAI's servers: clients such as Codex always send them, even
    if they do not need them.
    """
    path = f"tools[{index}].name"
    match tool.type:
        case "function":
            name = ToolName(required(tool.name, path), namespace)
            function = FunctionDefinition(
                name.model_name, tool.description, tool.parameters, tool.strict
            )
            return [(ChatTool(function), name)]
        case "namespace" if not namespace:
            name_space = required(tool.name, path)
            return [
                named for inner in tool.tools or () for named in _tools(index, inner, name_space)
            ]
    return []


def _ignored_tools(tools: Sequence[ResponsesTool]) -> tuple[str, ...]:
    """Return the types of tools that do not run here, as names of fields."""
    namespaces = [tool for tool in tools if tool.type == "namespace"]
    inner = [tool for namespace in namespaces for tool in namespace.tools or ()]
    names = [f"tools.{tool.type}" for tool in (*tools, *inner) if tool.type not in CALLABLE]
    return tuple(dict.fromkeys(names))


def _tool_choice(
    choice: str | ResponsesToolChoice | None,
) -> tuple[ToolChoice, Sequence[ToolName] | None]:
    """Return the tool choice, and the functions that it allows. None: all are allowed."""
    if choice is None or isinstance(choice, str):
        return ToolChoice(choice or "auto"), None
    if choice.type == "allowed_tools":
        allowed = [
            _tool_name(tool, f"tool_choice.tools[{index}]")
            for index, tool in enumerate(choice.tools or ())
        ]
        return ToolChoice(choice.mode or "auto"), allowed
    name = _tool_name(choice, "tool_choice").model_name
    return ToolChoice(name=name, param="tool_choice.function.name"), None


def _tool_name(tool: ResponsesToolChoice, path: str) -> ToolName:
    if tool.type != "function":
        raise bad_request(
            f"A tool of type {tool.type[:50]!r} cannot be chosen here.", param=f"{path}.type"
        )
    return ToolName(required(tool.name, f"{path}.name"), tool.namespace or "")
