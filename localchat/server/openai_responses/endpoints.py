"""POST /v1/responses: answer with numbered events, or with one object."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from localchat.engine.events import Done, Usage
from localchat.engine.request import Messages
from localchat.server.chat.content_blocks import (
    BlockClosed,
    BlockDelta,
    BlockEvent,
    BlockOpened,
    BlockOutcome,
    CollectedAnswer,
    ContentBlock,
    ContentBlocks,
)
from localchat.server.chat.endpoint import ConversationEndpoint
from localchat.server.chat.logprobs import chat_logprobs
from localchat.server.chat.media import translate
from localchat.server.chat.request import engine_request
from localchat.server.errors import ApiError
from localchat.server.fields import note_ignored
from localchat.server.generation import (
    Generation,
    GenerationSpec,
    OutputEvent,
)
from localchat.server.generation_response import GenerationResponse
from localchat.server.leases import AsyncLease
from localchat.server.openai_responses.mcp import (
    McpListing,
    McpRequest,
    McpServerTools,
    check_mcp_tools,
    server_tools,
)
from localchat.server.openai_responses.protocol import ResponsesBody
from localchat.server.openai_responses.requests import ToolName, as_chat, with_own_field_names
from localchat.server.openai_responses.response_object import (
    Json,
    ResponseObject,
    Status,
    final_status,
    summary_part,
    text_part,
)
from localchat.server.request_body import read_json
from localchat.server.sse import named_event
from localchat.server.state import client_of, service_of

if TYPE_CHECKING:
    from localchat.tools.mcp_servers import McpServers

_DELTAS = {"reasoning": "reasoning_summary_text", "call": "function_call_arguments"}
"""Name of a delta event, by kind of block."""


async def responses(request: Request) -> ASGIApp:
    """Validate the request; GenerationResponse answers it."""
    service = service_of(request)
    config = service.config
    body = await read_json(request, ResponsesBody, with_media=True)
    translated = await translate(request, lambda media: as_chat(body, media))
    note_ignored(request.scope, translated.ignored)
    check_mcp_tools(translated.mcp, service.mcp.names)
    try:
        prompt = engine_request(translated.chat, config.limits, client_of(request))
    except ApiError as error:
        raise with_own_field_names(error) from error
    endpoint = ResponsesEndpoint(
        translated.chat,
        prompt,
        body,
        translated.tool_names,
        translated.mcp,
        service.mcp,
        config.limits.tool_rounds,
    )
    return GenerationResponse(request, endpoint)


@dataclass(frozen=True, slots=True)
class ResponsesEndpoint(ConversationEndpoint):
    """A response."""

    body: ResponsesBody
    tool_names: Mapping[str, ToolName]
    """See ResponsesChat."""
    mcp: McpRequest
    servers: "McpServers"
    max_rounds: int

    async def spec(self, lease: AsyncLease) -> GenerationSpec:
        if not self.mcp.tools:
            return await ConversationEndpoint.spec(self, lease)
        prompt = self.request.prompt
        assert isinstance(prompt, Messages)
        tools, prompt = await server_tools(
            self.mcp,
            self.servers,
            prompt,
            self.max_rounds,
            lease.info.context_tokens,
        )
        offered = dataclasses.replace(
            self, request=msgspec.structs.replace(self.request, prompt=prompt)
        )
        spec = await ConversationEndpoint.spec(offered, lease)
        return dataclasses.replace(spec, tools=tools)

    def formatter(self, lease: AsyncLease, generation: Generation) -> "ResponsesFormatter":
        model = self.model or lease.name
        response = ResponseObject(model, self.body, self.tool_names)
        tools = generation.spec.tools
        if isinstance(tools, McpServerTools):
            response = dataclasses.replace(response, mcp_names=tools.names, listings=tools.listings)
        return ResponsesFormatter(response)


class ResponsesFormatter:
    """Formats the answers of the Responses API.

    An item is added, filled and done before the next one. Clients keep the content of an item's last event.
    """

    def __init__(self, response: ResponseObject) -> None:
        self._response = response
        self._blocks = ContentBlocks()
        self._item_ids: dict[int, str] = {}
        self._items_done: dict[int, Json] = {}
        """Items by their index in the output. Calls that run together may end in any order."""
        self._sequence_number = 0

    def start(self, choices: int, prompt_tokens: int) -> bytes:
        created = self._response.as_json("in_progress")
        events = self._event("response.created", response=created) + self.heartbeat()
        for index, listing in enumerate(self._response.listings):
            events += self._listing_events(index, listing)
        return events

    def _listing_events(self, index: int, listing: McpListing) -> bytes:
        position = {"item_id": listing.id, "output_index": index}
        state = "completed"
        if listing.error is not None:
            state = "failed"
        item = listing.item()
        self._items_done[index] = item
        added = item | {"tools": [], "error": None}
        return b"".join(
            (
                self._event("response.output_item.added", output_index=index, item=added),
                self._event("response.mcp_list_tools.in_progress", **position),
                self._event(f"response.mcp_list_tools.{state}", **position),
                self._event("response.output_item.done", output_index=index, item=item),
            )
        )

    def event(self, event: OutputEvent) -> bytes:
        return b"".join(self._block_event(change) for change in self._blocks.add(event))

    def finish(self, usage: Usage, done: Done | None) -> bytes:
        status = final_status(self._blocks.end)
        return self._event(f"response.{status}", response=self._current(status, usage=usage))

    def error(self, error: ApiError) -> bytes:
        return self._event("response.failed", response=self._current("failed", error=error))

    def heartbeat(self) -> bytes:
        return self._event("response.in_progress", response=self._current("in_progress"))

    def response(self, answer: CollectedAnswer, usage: Usage, done: Done | None) -> bytes:
        (choice,) = answer.choices
        output = [listing.item() for listing in self._response.listings]
        output += [
            self._response.item(self._response.item_id(block), block) for block in choice.blocks
        ]
        status = final_status(choice.end)
        return msgspec.json.encode(self._response.as_json(status, output, usage=usage))

    def _current(
        self, status: Status, usage: Usage | None = None, error: ApiError | None = None
    ) -> Json:
        items = [item for _, item in sorted(self._items_done.items())]
        return self._response.as_json(status, items, usage=usage, error=error)

    def _event(self, kind: str, **fields: object) -> bytes:
        event = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return named_event(kind.encode(), msgspec.json.encode(event))

    def _output_index(self, block: ContentBlock) -> int:
        return len(self._response.listings) + block.index

    def _item_event(self, block: ContentBlock, kind: str, **fields: object) -> bytes:
        """Return an event inside of an item. A message and a summary have one part each."""
        position: Json = {
            "item_id": self._item_ids[block.index],
            "output_index": self._output_index(block),
        }
        if block.kind == "text":
            position["content_index"] = 0
        elif block.kind == "reasoning":
            position["summary_index"] = 0
        return self._event(f"response.{kind}", **position, **fields)

    def _block_event(self, change: BlockEvent) -> bytes:
        match change:
            case BlockOpened(block):
                return self._opened(block)
            case BlockDelta(block, piece) if block.kind == "text":
                logprobs = chat_logprobs(change.logprobs)
                return self._item_event(block, "output_text.delta", delta=piece, logprobs=logprobs)
            case BlockDelta(block, piece):
                kind = _DELTAS[block.kind]
                if self._response.mcp_name(block) is not None:
                    kind = "mcp_call_arguments"
                return self._item_event(block, f"{kind}.delta", delta=piece)
            case BlockClosed(block):
                return self._closed(block)
            case BlockOutcome(block):
                state = "completed"
                if block.outcome is not None and block.outcome.error:
                    state = "failed"
                return self._item_event(block, f"mcp_call.{state}") + self._done(block)

    def _done(self, block: ContentBlock) -> bytes:
        item = self._response.item(self._item_ids[block.index], block)
        index = self._output_index(block)
        self._items_done[index] = item
        return self._event("response.output_item.done", output_index=index, item=item)

    def _opened(self, block: ContentBlock) -> bytes:
        id_ = self._item_ids[block.index] = self._response.item_id(block)
        item = self._response.item(id_, block, is_open=True)
        index = self._output_index(block)
        added = self._event("response.output_item.added", output_index=index, item=item)
        match block.kind:
            case "text":
                return added + self._item_event(block, "content_part.added", part=text_part(None))
            case "reasoning":
                part = summary_part("")
                return added + self._item_event(block, "reasoning_summary_part.added", part=part)
            case "call" if self._response.mcp_name(block) is not None:
                return added + self._item_event(block, "mcp_call.in_progress")
            case "call":
                return added

    def _closed(self, block: ContentBlock) -> bytes:
        text = block.text
        match block.kind:
            case "text":
                part = text_part(block)
                last = self._item_event(
                    block, "output_text.done", text=text, logprobs=part["logprobs"]
                ) + self._item_event(block, "content_part.done", part=part)
            case "reasoning":
                part = summary_part(text)
                last = self._item_event(
                    block, "reasoning_summary_text.done", text=text
                ) + self._item_event(block, "reasoning_summary_part.done", part=part)
            case "call" if self._response.mcp_name(block) is not None:
                # The item is done once the call has run.
                return self._item_event(block, "mcp_call_arguments.done", arguments=text)
            case "call":
                name = self._response.tool_name(block).name
                kind = "function_call_arguments.done"
                last = self._item_event(block, kind, name=name, arguments=text)
        return last + self._done(block)
