"""An answer of the Responses API, as numbered events or in one piece."""

from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from localchat.engine.events import Done, Usage
from localchat.server.content_blocks import (
    BlockClosed,
    BlockDelta,
    BlockEvent,
    BlockOpened,
    ContentBlock,
    ContentBlocks,
)
from localchat.server.errors import ApiError
from localchat.server.generation import GenerationSpec, OutputEvent
from localchat.server.leases import AsyncLease
from localchat.server.openai.chat import ConversationEndpoint
from localchat.server.openai.protocol import chat_logprobs
from localchat.server.openai.requests import chat_request
from localchat.server.openai_responses.protocol import ResponsesBody
from localchat.server.openai_responses.requests import ResponsesChat, as_chat, in_own_words
from localchat.server.openai_responses.response_object import (
    Json,
    ResponseObject,
    Status,
    ended,
    item_id,
    part,
    said,
    summary_part,
)
from localchat.server.request_body import decode, read_body
from localchat.server.sse import named
from localchat.server.state import client_of, service_of
from localchat.server.streaming import GenerationResponse


class ResponseStream:
    """Every item is added, filled and done before the next; clients take what they keep from its end."""

    def __init__(self, record: ResponseObject) -> None:
        self._record = record
        self._blocks = ContentBlocks()
        self._ids: dict[int, str] = {}
        self._done: list[Json] = []
        self._number = 0

    def opening(self, choices: int, prompt_tokens: int) -> bytes:
        begun = self._record.now("in_progress")
        return self._event("response.created", response=begun) + self.alive()

    def told(self, told: OutputEvent) -> bytes:
        return b"".join(self._written(change) for change in self._blocks.take(told))

    def ending(self, usage: Usage, done: Done | None) -> bytes:
        status = ended(self._blocks.end)
        return self._event(f"response.{status}", response=self._now(status, usage=usage))

    def broken(self, error: ApiError) -> bytes:
        return self._event("response.failed", response=self._now("failed", error=error))

    def alive(self) -> bytes:
        return self._event("response.in_progress", response=self._now("in_progress"))

    # ------------------------------------------------------------------------ events

    def _now(
        self, status: Status, usage: Usage | None = None, error: ApiError | None = None
    ) -> Json:
        return self._record.now(status, self._done, usage=usage, error=error)

    def _event(self, kind: str, **fields: object) -> bytes:
        told = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return named(kind.encode(), msgspec.json.encode(told))

    def _of(self, block: ContentBlock, kind: str, **fields: object) -> bytes:
        """An event inside of an item. A message and a summary have one part each."""
        at: Json = {"item_id": self._ids[block.index], "output_index": block.index}
        at |= {"text": {"content_index": 0}, "reasoning": {"summary_index": 0}}.get(block.kind, {})
        return self._event(f"response.{kind}", **at, **fields)

    def _written(self, change: BlockEvent) -> bytes:
        match change:
            case BlockOpened(block):
                return self._opened(block)
            case BlockDelta(block, piece) if block.kind == "text":
                logprobs = chat_logprobs(change.logprobs)
                return self._of(block, "output_text.delta", delta=piece, logprobs=logprobs)
            case BlockDelta(block) if self._is_custom(block):
                return b""  # its text stands inside of JSON, and is told when that is whole
            case BlockDelta(block, piece):
                return self._of(block, f"{_STREAMED[block.kind]}.delta", delta=piece)
            case BlockClosed(block):
                return self._closed(block)

    def _is_custom(self, block: ContentBlock) -> bool:
        return block.kind == "call" and self._record.place(block).custom

    def _opened(self, block: ContentBlock) -> bytes:
        id_ = self._ids[block.index] = item_id(block)
        item = self._record.added(id_, block)
        added = self._event("response.output_item.added", output_index=block.index, item=item)
        match block.kind:
            case "text":
                return added + self._of(block, "content_part.added", part=part(None))
            case "reasoning":
                empty = summary_part("")
                return added + self._of(block, "reasoning_summary_part.added", part=empty)
            case "call":
                return added

    def _closed(self, block: ContentBlock) -> bytes:
        text = block.text
        match block.kind:
            case "text":
                whole = part(block)
                last = self._of(
                    block, "output_text.done", text=text, logprobs=whole["logprobs"]
                ) + self._of(block, "content_part.done", part=whole)
            case "reasoning":
                last = self._of(block, "reasoning_summary_text.done", text=text) + self._of(
                    block, "reasoning_summary_part.done", part=summary_part(text)
                )
            case "call" if self._is_custom(block):
                given = said(block)
                kind = "custom_tool_call_input"
                last = self._of(block, f"{kind}.delta", delta=given)
                last += self._of(block, f"{kind}.done", input=given)
            case "call":
                last = self._of(block, "function_call_arguments.done", arguments=text)
        item = self._record.item(self._ids[block.index], block)
        self._done.append(item)
        return last + self._event("response.output_item.done", output_index=block.index, item=item)


_STREAMED = {"reasoning": "reasoning_summary_text", "call": "function_call_arguments"}


class ResponseWhole:
    """The whole answer as one object."""

    def __init__(self, record: ResponseObject) -> None:
        self._record = record
        self._blocks = ContentBlocks()

    def take(self, told: OutputEvent) -> None:
        self._blocks.take(told)

    def result(self, usage: Usage, done: Done | None) -> bytes:
        output = [self._record.item(item_id(block), block) for block in self._blocks.blocks]
        status = ended(self._blocks.end)
        return msgspec.json.encode(self._record.now(status, output, usage=usage))


# POST /v1/responses.


async def responses(request: Request) -> ASGIApp:
    """Validated here; answered by the Exchange."""
    config = service_of(request).config
    sent = decode(await read_body(request, config.limits), ResponsesBody, config.limits)
    understood = as_chat(sent)
    try:
        asked = chat_request(understood.chat, config.limits, client_of(request))
    except ApiError as error:
        raise in_own_words(error) from error
    plan = ResponsesEndpoint(understood.chat, asked, config.loop_guard, sent, understood)
    return GenerationResponse(request, plan)


@dataclass(frozen=True, slots=True)
class ResponsesEndpoint(ConversationEndpoint):
    """See Plan."""

    sent: ResponsesBody
    understood: ResponsesChat

    def stream(self, lease: AsyncLease, wish: GenerationSpec) -> ResponseStream:
        return ResponseStream(self._record(lease))

    def whole(self, lease: AsyncLease, wish: GenerationSpec) -> ResponseWhole:
        return ResponseWhole(self._record(lease))

    def _record(self, lease: AsyncLease) -> ResponseObject:
        return ResponseObject(self.sent.model or lease.name, self.sent, self.understood.tool_names)
