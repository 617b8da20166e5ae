"""Protocol of a session's view, and the blocks of a conversation that it shows."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from localchat.chat.conversation import Conversation, Node
from localchat.chat.prompt_messages import left_out, unsent_ids
from localchat.engine.events import Done
from localchat.engine.stats_line import brief_stats_line
from localchat.session.blocks import (
    AnswerBlock,
    Block,
    Branch,
    Fold,
    NoticeBlock,
    ReasoningBlock,
    SummaryBlock,
    ToolCallBlock,
    UserBlock,
)


class AnswerView(Protocol):
    """Shows an answer while it grows."""

    def put(self, block: Block) -> None:
        """Append a block, or replace the one with its id."""
        ...

    def append_text(self, id_: str, text: str) -> None:
        """Append to the text of a block that is being written."""
        ...

    def finish(self, block: Block) -> None:
        """Replace a block that was being written by its final state."""
        ...


class HiddenView:
    """Shows nothing of an answer, because its front end prints the events."""

    def put(self, block: Block) -> None:
        pass

    def append_text(self, id_: str, text: str) -> None:
        pass

    def finish(self, block: Block) -> None:
        pass


class SessionView(AnswerView, Protocol):
    """Shows what happens in a session. Called on the event loop only."""

    def show(self, blocks: Sequence[Block]) -> None:
        """Show all blocks, of another conversation or branch."""
        ...

    def remove(self, id_: str) -> None:
        """Remove a block that is out of date, if it is shown."""
        ...

    def status_changed(self) -> None:
        """Redraw the status after a change of state, metrics or title."""
        ...


def reasoning_id(node_id: str) -> str:
    """Return the id of the reasoning block of a message."""
    return f"{node_id}/reasoning"


def call_id(node_id: str, number: int) -> str:
    """Return the id of the block of a message's tool call, which is counted from 0."""
    return f"{node_id}/call/{number}"


def error_id(node_id: str) -> str:
    """Return the id of the notice that explains an incomplete message."""
    return f"{node_id}/error"


def node_of(block_id: str) -> str:
    """Return the id of the message that a block belongs to."""
    return block_id.partition("/")[0]


def transcript_blocks(conversation: Conversation) -> tuple[Block, ...]:
    """Return all blocks of the shown path, oldest first."""
    blocks: list[Block] = []
    unsent = unsent_ids(conversation)
    left_out_ids = [node.id for node in left_out(conversation)]
    for node in conversation.path():
        blocks += node_blocks(conversation, node, dimmed=node.id in unsent)
        if left_out_ids and node.id == left_out_ids[-1]:
            from localchat.chat.overflow import unsent_sentence

            tokens = conversation.policy.left_out_tokens
            sentence = unsent_sentence(len(left_out_ids), tokens)
            blocks.append(NoticeBlock("unsent", f"above: {sentence}"))
    return tuple(blocks)


def node_blocks(conversation: Conversation, node: Node, *, dimmed: bool = False) -> Iterator[Block]:
    """Yield the blocks of a message. `dimmed` means that the message is not sent."""
    branch = branch_of(conversation, node)
    message = node.message
    if node.replaces:
        yield SummaryBlock(node.id, message.content, len(node.replaces), _tokens(node), dimmed)
        return
    if message.role == "user":
        folds = tuple(Fold(item.label, item.start, item.end) for item in node.inclusions)
        yield UserBlock(node.id, message.content, folds, branch, dimmed, message.attachments)
        return
    if message.role == "tool":
        return  # the call shows it
    if message.reasoning:
        yield ReasoningBlock(reasoning_id(node.id), message.reasoning, None, dimmed)
    if message.tool_calls:
        results = conversation.results(node.id)
        for number, call in enumerate(message.tool_calls):
            run = None
            result = ""
            if (result_node := results.get(call.id)) is not None:
                run = result_node.run
                result = result_node.message.content
            id_ = call_id(node.id, number)
            yield ToolCallBlock(id_, call.name, call.arguments, dimmed, run, result)
    if message.content or not message.tool_calls:
        yield AnswerBlock(
            node.id,
            message.content,
            branch,
            footer_of(node, other_model=_model_changed(conversation, node)),
            dimmed,
            ended_words(node),
        )
    if node.error:
        yield NoticeBlock(error_id(node.id), node.error, "error")


def _tokens(node: Node) -> int:
    """Return the tokens of a generated message. 0 if they were not counted."""
    if node.metrics is None or node.metrics.done is None:
        return 0
    return node.metrics.done.usage.completion_tokens


def branch_of(conversation: Conversation, node: Node) -> Branch:
    """Return the number of a version among the versions of its message."""
    ids = [sibling.id for sibling in conversation.siblings(node.id)]
    number = 1
    if node.id in ids:
        number = ids.index(node.id) + 1
    return Branch(number, max(1, len(ids)))


def _model_changed(conversation: Conversation, node: Node) -> bool:
    """Whether another model wrote the previous answer."""
    parent = node.parent
    while parent is not None:
        previous = conversation.nodes[parent]
        if previous.metrics is not None:
            return node.metrics is not None and node.metrics.model != previous.metrics.model
        parent = previous.parent
    return False


_ENDED = {
    "stopped": "stopped",
    "length": "stopped at the length limit",
    "failed": "interrupted",
    "open": "interrupted",
}


def ended_words(node: Node) -> str:
    """Return why an answer is not complete. Empty for a complete answer."""
    done = None
    if node.metrics is not None:
        done = node.metrics.done
    if node.end is not None and node.end.reason == "repetition":
        loop = node.end.repetition
        if loop is None:
            return "ended in a loop"
        return f"ended: it repeated {loop.name()} {loop.times} times"
    full = done is not None and _fills_context(done)
    if node.state == "length" and (full or (node.end is not None and node.end.limit == "context")):
        return "the context is full: the answer stops here"
    if node.end is not None and done is not None:
        return f"cut at {done.usage.completion_tokens:,} tokens: /set max_tokens allows more"
    return _ENDED.get(node.state, "")


def _fills_context(done: Done) -> bool:
    used = done.usage.prompt_tokens + done.usage.completion_tokens
    return 0 < done.kv_total_tokens <= used + 1


def footer_of(node: Node, *, other_model: bool = False) -> str:
    """Return the metrics below an answer.

    `other_model` names the model too, because another one wrote the previous answer.
    """
    metrics = node.metrics
    if metrics is None or metrics.done is None:
        return ""
    line = brief_stats_line(metrics.done)
    if other_model:
        return f"{metrics.model} · {line}"
    return line
