"""The response object of the Responses API and its output items."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from localchat.engine.events import Usage
from localchat.server.chat.content_blocks import ContentBlock
from localchat.server.chat.logprobs import chat_logprobs
from localchat.server.chat.structure import TypedFormat
from localchat.server.errors import ApiError
from localchat.server.formatters import new_id
from localchat.server.generation import ChoiceEnd
from localchat.server.openai_responses.mcp import McpListing, McpName, error_json
from localchat.server.openai_responses.protocol import ReasoningConfig, ResponsesBody
from localchat.server.openai_responses.requests import CALLABLE, ToolName

Json: TypeAlias = dict[str, Any]
Status: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed"]


@dataclass(frozen=True, slots=True)
class ResponseObject:
    """The part of a response that is the same in all its events."""

    model: str
    body: ResponsesBody
    """The request. The response repeats a part of it."""
    tool_names: Mapping[str, ToolName]
    """See ResponsesChat."""
    mcp_names: Mapping[str, McpName] = field(default_factory=dict)
    """The client's names of MCP tools, by the names that the model sees."""
    listings: Sequence[McpListing] = ()
    id: str = field(default_factory=lambda: new_id("resp_"))
    created_s: int = field(default_factory=lambda: int(time.time()))

    def as_json(
        self,
        status: Status,
        output: Sequence[Json] = (),
        *,
        usage: Usage | None = None,
        error: ApiError | None = None,
    ) -> Json:
        """Return the whole object."""
        body = self.body
        reasoning = body.reasoning or ReasoningConfig()
        cut_off = status == "incomplete"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_s,
            "status": status,
            "model": self.model,
            "output": output,
            "instructions": body.instructions,
            "error": None if error is None else _error(error),
            "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning.effort, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": (body.text and body.text.format) or TypedFormat(type="text")},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool for tool in body.tools or () if tool.type in CALLABLE],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": _usage(usage) if usage else None,
        }

    def tool_name(self, block: ContentBlock) -> ToolName:
        """Return the client's name of the tool that a call names."""
        return self.tool_names.get(block.name, ToolName(block.name))

    def mcp_name(self, block: ContentBlock) -> McpName | None:
        """Return the MCP tool that a block calls. None for other blocks."""
        if block.kind != "call":
            return None
        return self.mcp_names.get(block.name)

    def item_id(self, block: ContentBlock) -> str:
        """Return a new id for the item of a block."""
        prefix = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}[block.kind]
        if self.mcp_name(block) is not None:
            prefix = "mcp_"
        return new_id(prefix)

    def item(self, id_: str, block: ContentBlock, *, is_open: bool = False) -> Json:
        """Return the item of a block: empty if the block was just opened."""
        status: Status = "incomplete"
        if is_open:
            status = "in_progress"
        elif block.complete:
            status = "completed"
        match block.kind:
            case "text":
                content = [] if is_open else [text_part(block)]
                item: Json = {"type": "message", "status": status, "role": "assistant"}
                item["content"] = content
            case "reasoning":
                summary = [] if is_open else [summary_part(block.text)]
                item = {"type": "reasoning", "summary": summary}
            case "call" if (name := self.mcp_name(block)) is not None:
                item = self._mcp_item(block, name, status)
            case "call":
                tool = self.tool_name(block)
                item = {"type": "function_call", "status": status, "arguments": block.text}
                item |= {"call_id": block.id, "name": tool.name}
                if tool.namespace:
                    item["namespace"] = tool.namespace
        return {"id": id_, **item}

    def _mcp_item(self, block: ContentBlock, name: McpName, status: Status) -> Json:
        item: Json = {
            "type": "mcp_call",
            "server_label": name.label,
            "name": name.name,
            "arguments": block.text,
            "status": status,
            "approval_request_id": None,
            "output": None,
            "error": None,
        }
        if block.outcome is not None and block.outcome.error:
            item |= {"status": "failed", "error": error_json(block.outcome.error)}
        elif block.outcome is not None:
            item["output"] = block.outcome.output
        return item


def text_part(block: ContentBlock | None) -> Json:
    """Return the text part of a message. None stands for a message without a piece so far."""
    return {
        "type": "output_text",
        "annotations": [],
        "logprobs": chat_logprobs(tuple(block.logprobs)) if block else [],
        "text": block.text if block else "",
    }


def summary_part(text: str) -> Json:
    """Return the whole reasoning, instead of the protocol's summary."""
    return {"type": "summary_text", "text": text}


def final_status(end: ChoiceEnd | None) -> Literal["completed", "incomplete"]:
    """Return the status of a response with this end."""
    if end is not None and end.reason == "length":
        return "incomplete"
    return "completed"


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _error(error: ApiError) -> Json:
    # The protocol has few error codes, and one for all failures of the server.
    code = "server_error" if error.status >= 500 else error.code or "invalid_prompt"
    return {"code": code, "message": error.message}
