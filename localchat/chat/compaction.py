"""/compact: the model summarizes the older part of a conversation, and the summary is sent instead.

A text longer than the context is read in chunks that fit. Each chunk after the first is sent with the summary
so far.
"""

from typing import Final

import msgspec

from localchat.chat.conversation import AnswerMetrics, Conversation, Node
from localchat.chat.prompt_messages import (
    SUMMARY_ROLE,
    Count,
    as_sent,
    exchanges,
    sent_nodes,
    sent_summaries,
)
from localchat.engine.attachments import described_content
from localchat.engine.events import Done, Event, MetricsSnapshot, Prefill
from localchat.engine.interface import EngineInfo
from localchat.engine.request import GenerateRequest, Message, Messages, Sampling
from localchat.errors import ContextExceeded, UsageError
from localchat.fit.memory_plan import largest

_ASK: Final = (
    "Below is {part} of a conversation between a user and an assistant. Write a summary of it that lets the "
    "assistant go on without the text: what the user wants, what was found and decided, names, numbers, code "
    "and file names that still matter, and what is open. Write it in the language of the conversation, as "
    "plain facts, without an introduction."
)
_SO_FAR: Final = "This is the summary of what came before; take it up into the new one:"
_MAX_SUMMARY_TOKENS: Final = 1024
_KEPT_EXCHANGES: Final = 3
_MIN_CHUNK_CHARACTERS: Final = 16
_TOKENS_PER_CHARACTER: Final = 4
"""Upper bound for every tokenizer: the bytes of a character in UTF-8."""


class Compaction:
    """A run of /compact.

    Send `request()` to an engine and pass the answer to `take` until `request()` is None. Then `finish` puts
    the summary into the conversation. Nothing changes before that. The last question is kept, with up to two
    exchanges before it if they need less than half of the context. Raises UsageError if there is nothing to
    summarize, ContextExceeded if the context is too short for a summary.
    """

    def __init__(self, conversation: Conversation, count: Count, context_tokens: int) -> None:
        self._conversation = conversation
        self._count = count
        self.summary_tokens = max(min(context_tokens // 4, _MAX_SUMMARY_TOKENS), 1)
        self._allowed = context_tokens - self.summary_tokens
        self._earlier = sent_summaries(conversation)
        """Summaries that the new one includes."""
        groups = exchanges(sent_nodes(conversation))
        kept = self._kept(groups, context_tokens // 2)
        self.replaced: tuple[Node, ...] = tuple(
            node for group in groups[: len(groups) - kept] for node in group
        )
        """Nodes that the summary will replace."""
        if not self.replaced:
            raise UsageError(
                "there is nothing to summarize: only the last question is sent",
                hint="shorten it, or use a longer context",
            )
        self._summary = "\n\n".join(node.message.content for node in self._earlier)
        self._text = "\n\n".join(
            f"{node.message.role}: {content}"
            for node in self.replaced
            if (content := described_content(node.message))
        )
        self._done = 0
        self._reading = 0
        self._share = 0.0
        """Completed share of the current request."""
        self._prompt_tokens = 0
        self._done_event: Done | None = None
        if not self._fits(len(self._text)):
            new_summary_tokens = self.summary_tokens
            if self._summary:
                new_summary_tokens = 0
            # The request after the first chunk includes the summary so far.
            self._certain_length(new_summary_tokens)

    @property
    def progress(self) -> float:
        """Completed share of the work, from 0 to 1. Read and generated tokens count alike."""
        current = max(self._reading - self._done, 0) * self._share
        return (self._done + current) / max(len(self._text), 1)

    def observe(self, event: Event) -> None:
        """Update the progress of the current request from an event."""
        match event:
            case Prefill(done=done, total=total):
                self._share = done / max(total + self.summary_tokens, 1)
                self._prompt_tokens = total
            case MetricsSnapshot(completion_tokens=written) if written:
                work = self._prompt_tokens + self.summary_tokens
                self._share = min(1.0, (self._prompt_tokens + written) / work)
            case Done():
                self._done_event = event
            case _:
                pass

    def request(self) -> GenerateRequest | None:
        """Return the next request, or None once everything was read."""
        if self._done >= len(self._text):
            return None
        self._reading = self._done + self._chunk()
        self._share = 0.0
        return GenerateRequest(
            self._messages(self._reading),
            sampling=Sampling(temperature=0.3),
            max_tokens=self.summary_tokens,
        )

    def take(self, answer: str) -> None:
        """Accept the answer to the last `request`. Raises UsageError for an empty one."""
        if not answer.strip():
            raise UsageError("the model wrote an empty summary; nothing was changed")
        self._summary = answer.strip()
        self._done = self._reading

    def finish(self, info: EngineInfo | None = None) -> tuple[Node, ...]:
        """Put the summary into the conversation, and return the new or changed nodes.

        `info` describes the engine that wrote the summary, for the metrics. A question that waits for its
        answer moves after the summary.
        """
        conversation = self._conversation
        waiting = self._waiting_question()
        parent = conversation.head
        if waiting is not None:
            parent = waiting.parent
        replaced = (*self._earlier, *self.replaced)
        summary = conversation.add(
            Message(SUMMARY_ROLE, self._summary),
            parent=parent,
            replaces=[node.id for node in replaced],
        )
        if info is not None:
            summary = msgspec.structs.replace(
                summary, metrics=AnswerMetrics.of(info, 0, self._done_event)
            )
            conversation.put(summary)
        if waiting is None:
            return (summary,)
        moved = msgspec.structs.replace(waiting, parent=summary.id)
        conversation.put(moved)
        conversation.head = moved.id
        return (summary, moved)

    def _waiting_question(self) -> Node | None:
        """Return the last message if it is a question without an answer."""
        if self._conversation.head is None:
            return None
        node = self._conversation.nodes[self._conversation.head]
        if node.message.role != "user":
            return None
        return node

    def _kept(self, groups: tuple[tuple[Node, ...], ...], max_tokens: int) -> int:
        """Return the number of exchanges to keep, which need at most `max_tokens`."""
        for kept in range(min(_KEPT_EXCHANGES, len(groups) - 1), 1, -1):
            nodes = tuple(node for group in groups[-kept:] for node in group)
            if self._count(Messages(as_sent(self._conversation, nodes))) <= max_tokens:
                return kept
        return 1

    def _chunk(self) -> int:
        """Return how many characters to read next. Bisects for the longest chunk that fits."""
        start = self._done
        unread = len(self._text) - self._done
        if self._fits(len(self._text)):
            return unread
        step = self._certain_length()
        longest = largest(lambda length: self._fits(start + length), unread, step)
        return max(longest, min(step, unread))

    def _certain_length(self, summary_tokens: int = 0) -> int:
        """Return how many characters certainly fit beside a summary. Raises ContextExceeded."""
        base = self._count(self._messages(self._done)) + summary_tokens
        step = (self._allowed - base) // _TOKENS_PER_CHARACTER
        if step < _MIN_CHUNK_CHARACTERS:
            raise ContextExceeded(
                f"the context is too short for a summary: the request itself takes {base:,} tokens",
                hint="use a longer context, or leave out the oldest messages",
                prompt_tokens=base,
                context_tokens=self._allowed + self.summary_tokens,
            )
        return step

    def _fits(self, end: int) -> bool:
        return self._count(self._messages(end)) <= self._allowed

    def _messages(self, end: int) -> Messages:
        first = self._done == 0 and not self._summary
        last = end >= len(self._text)
        if not first:
            part = "the next part"
        elif last:
            part = "the text"
        else:
            part = "the beginning"
        parts = [_ASK.format(part=part)]
        if self._summary:
            parts += [_SO_FAR, self._summary]
        parts += ["---", self._text[self._done : end], "---"]
        return Messages((Message("user", "\n\n".join(parts)),), thinking="off")


def without_summary(conversation: Conversation) -> tuple[Node, ...]:
    """Remove the summaries from the path, so that the messages they replaced are sent again.

    They stay as branches. Returns the nodes that changed, apart from the head.
    """
    changed: dict[str, Node] = {}
    for summary in reversed([node for node in conversation.path() if node.replaces]):
        for child in conversation.children(summary.id):
            changed[child.id] = msgspec.structs.replace(child, parent=summary.parent)
            conversation.put(changed[child.id])
        if conversation.head == summary.id:
            conversation.head = summary.parent
    return tuple(conversation.nodes[id_] for id_ in changed)
