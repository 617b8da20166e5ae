"""The object that an answer of the Responses API is, at every moment of it; and its items."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

from localchat.engine.events import Usage
from localchat.server.content_blocks import ContentBlock
from localchat.server.errors import ApiError
from localchat.server.formatters import new_id
from localchat.server.generation import ChoiceEnd
from localchat.server.openai.protocol import chat_logprobs
from localchat.server.openai_responses.protocol import ResponsesBody, TextFormat
from localchat.server.openai_responses.requests import ToolName

Json: TypeAlias = dict[str, Any]
Status: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed"]


@dataclass(frozen=True, slots=True)
class ResponseObject:
    """What does not change from the first event to the last. `body`: what was asked, part of which is said
    again."""

    model: str
    body: ResponsesBody
    tool_names: Mapping[str, ToolName]
    id: str = field(default_factory=lambda: new_id("resp_"))
    created_s: int = field(default_factory=lambda: int(time.time()))

    def now(
        self,
        status: Status,
        output: Sequence[Json] = (),
        *,
        usage: Usage | None = None,
        error: ApiError | None = None,
    ) -> Json:
        """The whole object. The key `error` stands in it only where there is one."""
        body = self.body
        made: Json = {
            "id": self.id,
            "object": "response",
            "created_at": self.created_s,
            "status": status,
            "model": self.model,
            "output": output,
            "instructions": body.instructions,
            "incomplete_details": _cut() if status == "incomplete" else None,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {
                "effort": body.reasoning.effort if body.reasoning else None,
                "summary": None,
            },
            "store": False,
            "temperature": body.temperature,
            "text": {"format": _format(body)},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": _usage(usage) if usage else None,
        }
        if error is not None:
            made["error"] = _failure(error)
        return made

    def added(self, id_: str, block: ContentBlock) -> Json:
        """A block that has just begun, without anything in it."""
        return self._item(id_, block, "in_progress")

    def item(self, id_: str, block: ContentBlock) -> Json:
        """A block that will not change any more."""
        return self._item(id_, block, "completed" if block.whole else "incomplete")

    def place(self, block: ContentBlock) -> ToolName:
        """Where the function of a call stands."""
        return self.tool_names.get(block.name, ToolName(block.name))

    def _item(self, id_: str, block: ContentBlock, status: Status) -> Json:
        begun = status == "in_progress"
        match block.kind:
            case "text":
                content = [] if begun else [part(block)]
                made = {
                    "type": "message",
                    "status": status,
                    "role": "assistant",
                    "content": content,
                }
            case "reasoning":
                made = {"type": "reasoning", "summary": [] if begun else [summary_part(block.text)]}
            case "call":
                place = self.place(block)
                made = {
                    "type": "function_call",
                    "status": status,
                    "arguments": block.text,
                    "call_id": block.id,
                    "name": place.name,
                }
                if place.custom:
                    made |= {"type": "custom_tool_call", "input": "" if begun else said(block)}
                    del made["arguments"]
                made |= {"namespace": place.namespace} if place.namespace else {}
        return {"id": id_, **made}


def item_id(block: ContentBlock) -> str:
    return new_id({"text": "msg_", "reasoning": "rs_", "call": "fc_"}[block.kind])


def said(block: ContentBlock) -> str:
    """The text that a custom tool was called with; as far as it came, where it was cut off."""
    try:
        found = msgspec.json.decode(block.text, type=_Said)
    except msgspec.DecodeError:
        return block.text
    return found.input


class _Said(msgspec.Struct, frozen=True):
    input: str


def part(block: ContentBlock | None) -> Json:
    """The text of a message; None: before its first piece."""
    return {
        "type": "output_text",
        "annotations": [],
        "logprobs": chat_logprobs(tuple(block.logprobs)) if block else [],
        "text": block.text if block else "",
    }


def summary_part(text: str) -> Json:
    """Reasoning is shown whole where the protocol has a summary."""
    return {"type": "summary_text", "text": text}


def ended(end: ChoiceEnd | None) -> Literal["completed", "incomplete"]:
    return "incomplete" if end is not None and end.reason == "length" else "completed"


def _cut() -> Json:
    return {"reason": "max_output_tokens"}


def _format(body: ResponsesBody) -> TextFormat:
    wanted = body.text.format if body.text else None
    return wanted or TextFormat("text")


def _usage(usage: Usage) -> Json:
    """Reasoning is part of the output and not counted apart."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _failure(error: ApiError) -> Json:
    """The protocol has few codes; a failure of the server is one."""
    code = "server_error" if error.status >= 500 else error.code or "invalid_prompt"
    return {"code": code, "message": error.message}
