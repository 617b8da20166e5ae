"""Paged KV cache of a model with sliding windows. Windowed layers have their own blocks and block table.

A block is released once it lies before the window of every token still to be computed. Its entry in the table
stays, but is no longer read. So a sequence holds window blocks only for its window and for the steps in flight,
however long it is. A prefix hit of n tokens needs all n tokens' blocks of the other layers, and only the last
`window` tokens' blocks of the windowed layers.

A sequence never goes back before its committed tokens, and steps in flight start there or later. So the
committed length determines which blocks can be released. The runner must have blocks for the windows of all
its rows and for the steps in flight (Capabilities.max_rows). With fewer, sequences are preempted.

Groups of layers with their own block tables, and hits that need only the last window, follow vLLM's hybrid KV
cache manager.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from localchat.backend_api.interface import Copy, MemoryOp
from localchat.core.kv_cache.manager import CacheUpdate, PrefixHit, ValidTokens
from localchat.core.kv_cache.paged import ExtendedKVCacheManager, PagedKVCacheManager, PagedPrefix
from localchat.core.kv_cache.prefix_tree import PrefixMatch, PrefixNode
from localchat.core.kv_cache.window_blocks import WindowBlocks

_SPARE_BLOCKS = 1
"""Blocks kept before a window. Prompts often omit the last tokens of an earlier prompt."""
_NO_WINDOW = "its sliding window was evicted to make room"


@dataclass(slots=True, eq=False)
class _SequenceWindow:
    """Window blocks of a running sequence."""

    table: list[int]
    first: int
    """Index of the first table entry that the sequence still holds."""
    committed: int
    ends: range
    """Table entries that the end of the prompt attends to."""
    published: int
    """Tokens whose full nodes name their blocks."""
    leaf: PrefixNode | None = None
    """Last node that names one of the blocks."""


class _WindowedPrefix(NamedTuple):
    others: PrefixHit
    """Hit in the layers without a window."""
    walk: PrefixMatch


class WindowedKVCacheManager(ExtendedKVCacheManager):
    """See KVCacheManager. Counts of KVUsage are those of the layers without a window."""

    def __init__(
        self, pages: PagedKVCacheManager, block_tokens: int, window_tokens: int, window_blocks: int
    ) -> None:
        """`pages`: manager of the layers without a window, without host blocks.

        `window_tokens`: keys that a query of the windowed layers attends to, its own included.
        """
        super().__init__(pages)
        self._size = block_tokens
        self._window = window_tokens
        self._blocks = WindowBlocks(window_blocks)
        self._running: dict[int, _SequenceWindow] = {}

    def _first_seen(self, tokens: int) -> int:
        """Return the first block that the token after `tokens` attends to."""
        return max(0, (tokens + 1 - self._window) // self._size)

    def _first_kept(self, tokens: int) -> int:
        return max(0, self._first_seen(tokens) - _SPARE_BLOCKS)

    def find_prefix(self, tokens: Sequence[int], salt: str, exact_chunk: int = 0) -> PrefixHit:
        others = self._pages.find_prefix(tokens, salt, exact_chunk)
        length = self._usable(_walk(others))
        why = others.why_missed
        if exact_chunk:
            length -= length % exact_chunk
        if length < others.cached:
            others = self._pages.find_prefix(tokens[: length + 1], salt)
            why = _NO_WINDOW
            assert others.cached == length
        return PrefixHit(length, why, _WindowedPrefix(others, _walk(others)))

    def _usable(self, walk: PrefixMatch) -> int:
        """Return the length of the longest prefix whose window is cached."""
        nodes = walk.nodes
        find = self._blocks.find
        end = len(nodes)
        length = end * self._size
        if walk.partial is not None and find(walk.partial) is not None:
            length += walk.shared
        while length:
            seen = range(end - 1, self._first_seen(length) - 1, -1)
            missing = next((i for i in seen if find(nodes[i]) is None), None)
            if missing is None:
                break
            end = missing
            length = missing * self._size
        return length

    def allocate(
        self, seq: int, tokens: Sequence[int], hit: PrefixHit, salt: str, owner: str = ""
    ) -> CacheUpdate | None:
        assert isinstance(hit.source, _WindowedPrefix)
        others, (nodes, partial, shared, _, _) = hit.source
        blocks = self._blocks
        first = self._first_seen(hit.cached)
        seen = [block for node in nodes[first:] if (block := blocks.find(node)) is not None]
        assert len(seen) == max(0, len(nodes) - first), "the hit is older than the last change"
        source = None
        used = list(seen)
        if partial is not None and (source := blocks.find(partial)) is not None:
            used.append(source)
        if blocks.room <= sum(not blocks.holders(block) for block in used):
            return None
        update = self._pages.allocate(seq, tokens, others, salt, owner)
        if update is None:
            return None
        for block in used:
            blocks.hold(block)
        last = source
        memory = list[MemoryOp]()
        if source is None or partial is None or not self._continues(source, partial, shared):
            last = blocks.take()
            if source is not None:
                memory.append(Copy(source, last, shared, window=True))
                blocks.release(source, end=True, keep=True)
        assert last is not None
        ends = range(self._first_kept(len(tokens)), len(tokens) // self._size + 1)
        return self._start(seq, update, memory, [*seen, last], first, hit.cached, ends)

    def _continues(self, block: int, partial: PrefixNode, shared: int) -> bool:
        """Return whether a sequence may append to a block that it just acquired."""
        return shared == len(partial.tokens) and self._blocks.holders(block) == 1

    def _start(
        self,
        seq: int,
        update: CacheUpdate,
        memory: list[MemoryOp],
        blocks: list[int],
        first: int,
        committed: int,
        ends: range,
    ) -> CacheUpdate:
        """Start a sequence with these blocks at table entry `first`."""
        table = [0] * first + blocks
        window = _SequenceWindow(table, first, committed, ends, (len(table) - 1) * self._size)
        self._running[seq] = window
        self._publish(seq, window)
        return update._replace(memory=(*update.memory, *memory), new_window_blocks=tuple(table))

    def extend(self, seq: int, tokens: int) -> CacheUpdate | None:
        table = self._running[seq].table
        missing = -(-tokens // self._size) - len(table)
        if missing > self._blocks.room:
            return None
        update = self._pages.extend(seq, tokens)
        if update is None or missing <= 0:
            return update
        new = tuple(self._blocks.take() for _ in range(missing))
        table.extend(new)
        return update._replace(new_window_blocks=new)

    def commit(self, seq: int, tokens: Sequence[int], valid: ValidTokens) -> CacheUpdate:
        update = self._pages.commit(seq, tokens, valid)
        window = self._running[seq]
        window.committed = valid.computed
        self._publish(seq, window)
        first = max(window.first, self._first_kept(valid.computed))
        for index in range(window.first, first):
            self._blocks.release(window.table[index], end=index in window.ends, keep=True)
        window.first = first
        return update

    def _publish(self, seq: int, window: _SequenceWindow) -> None:
        """Make the blocks of newly published nodes findable."""
        leaf = node = self._pages.leaf(seq)
        if leaf is window.leaf:
            return
        while node is not None and node.end > window.published:
            self._blocks.name(window.table[(node.end - 1) // self._size], node)
            node = node.parent
        window.leaf = leaf
        if leaf is not None:
            window.published = leaf.end // self._size * self._size

    def fork(self, seq: int, child: int) -> CacheUpdate | None:
        parent = self._running[seq]
        if not self._blocks.room or (update := self._pages.fork(seq, child)) is None:
            return None
        full, part = divmod(parent.committed, self._size)
        first = self._first_seen(parent.committed)
        shared = parent.table[first:full]
        for block in shared:
            self._blocks.hold(block)
        last = self._blocks.take()
        memory: list[MemoryOp] = []
        if part:
            memory.append(Copy(parent.table[full], last, part, window=True))
        return self._start(
            child, update, memory, [*shared, last], first, parent.committed, parent.ends
        )

    def release(self, seq: int, *, keep: bool) -> CacheUpdate:
        window = self._running.pop(seq)
        update = self._pages.release(seq, keep=keep)
        for block in window.table[window.first :]:
            self._blocks.release(block, end=True, keep=keep)
        return update


def _walk(hit: PrefixHit) -> PrefixMatch:
    assert isinstance(hit.source, PagedPrefix)
    return hit.source.walk
