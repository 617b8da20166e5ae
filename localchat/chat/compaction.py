"""/compact: the model summarizes the older part of a conversation, and the summary is sent in its place.

A text longer than the context is read in chunks that fit; each chunk after the first comes with the summary
so far.
"""

from typing import Final

import msgspec

from localchat.chat.conversation import AnswerMetrics, Conversation, Node
from localchat.chat.overflow import Count
from localchat.chat.prompt_messages import SUMMARY_ROLE, as_sent, exchanges, sent_nodes
from localchat.engine.events import Done, Event, MetricsSnapshot, Prefill
from localchat.engine.interface import EngineInfo
from localchat.engine.request import GenerateRequest, Message, Messages, Sampling
from localchat.errors import ContextExceeded, UsageError

_ASK: Final = (
    "Below is {part} of a conversation between a user and an assistant. Write a summary of it that lets the "
    "assistant go on without the text: what the user wants, what was found and decided, names, numbers, code "
    "and file names that still matter, and what is open. Write it in the language of the conversation, as "
    "plain facts, without an introduction."
)
_SO_FAR: Final = "This is the summary of what came before; take it up into the new one:"
_MOST_SUMMARY_TOKENS: Final = 1024
_KEPT_EXCHANGES: Final = 3
_MIN_CHUNK_CHARACTERS: Final = 16
_TOKENS_PER_CHARACTER: Final = 4
"""An upper bound for every tokenizer: the bytes of one character in UTF-8."""


class Compaction:
    """One run. Send `request()` to an engine and pass the answer to `take` until `request()` is None.

    Then `finish` puts the summary into the conversation; nothing changes before that. The last question stays
    as it is, with up to two exchanges before it while they take less than half of the context. Raises
    UsageError where there is nothing to summarize, ContextExceeded where no chunk fits the context.
    """

    def __init__(self, conversation: Conversation, count: Count, context_tokens: int) -> None:
        self._conversation = conversation
        self._count = count
        self.summary_tokens = max(min(context_tokens // 4, _MOST_SUMMARY_TOKENS), 1)
        self._allowed = context_tokens - self.summary_tokens
        groups = exchanges(sent_nodes(conversation))
        kept = self._kept(groups, context_tokens // 2)
        self.replaced: tuple[Node, ...] = tuple(
            node for group in groups[: len(groups) - kept] for node in group
        )
        """The nodes that the summary will stand for."""
        if not self.replaced:
            raise UsageError(
                "there is nothing to summarize: only the last question is sent",
                hint="shorten it, or use a longer context",
            )
        self._summary = "\n\n".join(node.message.content for node in self._earlier())
        self._text = "\n\n".join(
            f"{node.message.role}: {node.message.content}"
            for node in self.replaced
            if node.message.content
        )
        self._done = 0
        self._reading = 0
        self._share = 0.0
        """Share of the current request that is done."""
        self._prompt_tokens = 0
        self._done_event: Done | None = None

    @property
    def progress(self) -> float:
        """Share of the work that is done, 0 to 1: tokens read and written count alike."""
        current = (self._reading - self._done) * self._share if self._reading > self._done else 0.0
        return (self._done + current) / max(len(self._text), 1)

    def observe(self, event: Event) -> None:
        """Note the progress of the current request."""
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
        """The next request, or None when everything was read."""
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
        """Put the summary into the conversation; returns the nodes that are new or changed.

        `info`: the engine that wrote it, for the metrics.

        A question that waits for its answer moves after the summary.
        """
        conversation = self._conversation
        head = conversation.nodes[conversation.head] if conversation.head else None
        waits = head is not None and head.message.role == "user"
        earlier = self._earlier()
        summary = conversation.add(
            Message(SUMMARY_ROLE, self._summary),
            parent=head.parent if waits and head is not None else conversation.head,
            replaces=[node.id for node in (*earlier, *self.replaced)],
        )
        if info is not None:
            summary = msgspec.structs.replace(summary, metrics=self._metrics(info))
            conversation.put(summary)
        if not waits or head is None:
            return (summary,)
        moved = msgspec.structs.replace(head, parent=summary.id)
        conversation.put(moved)
        conversation.head = moved.id
        return (summary, moved)

    def _metrics(self, info: EngineInfo) -> AnswerMetrics:
        """Return who wrote the summary, and its length."""
        return AnswerMetrics(
            model=info.model,
            backend=info.backend,
            quantization=info.quantization,
            kv_type=info.kv_type,
            draw_seed=0,
            done=self._done_event,
        )

    def _earlier(self) -> tuple[Node, ...]:
        """Summaries on the path, which the new one includes."""
        path = self._conversation.path()
        replaced = {id_ for node in path for id_ in node.replaces}
        return tuple(node for node in path if node.replaces and node.id not in replaced)

    def _kept(self, groups: tuple[tuple[Node, ...], ...], most_tokens: int) -> int:
        for kept in range(min(_KEPT_EXCHANGES, len(groups) - 1), 1, -1):
            nodes = tuple(node for group in groups[-kept:] for node in group)
            if self._counted(Messages(as_sent(self._conversation, nodes))) <= most_tokens:
                return kept
        return 1

    def _chunk(self) -> int:
        """Characters to read next: the most that fit, by bisection in steps that surely do."""
        start = self._done
        rest = len(self._text) - self._done
        base = self._counted(self._messages(start))
        step = (self._allowed - base) // _TOKENS_PER_CHARACTER
        if step < _MIN_CHUNK_CHARACTERS:
            raise ContextExceeded(
                f"the context is too short to sum anything up: {base:,} tokens go to the request itself",
                hint="use a longer context, or leave out the oldest messages",
                prompt_tokens=base,
                context_tokens=self._allowed + self.summary_tokens,
            )
        if self._fits(len(self._text)):
            return rest
        low = 1
        high = -(-rest // step)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(start + middle * step) else (low, middle)
        return min(low * step, rest)

    def _fits(self, end: int) -> bool:
        return self._counted(self._messages(end)) <= self._allowed

    def _counted(self, messages: Messages) -> int:
        try:
            return self._count(messages)
        except ContextExceeded:
            return 1 << 40

    def _messages(self, end: int) -> Messages:
        first = self._done == 0 and not self._summary
        last = end >= len(self._text)
        part = "the text" if first and last else "the beginning" if first else "the next part"
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
