"""Paged KV cache of a model with sliding windows, whose layers have blocks and a block table of their own.

A block before the window of every token still to be computed is given back while its sequence goes on; its
entry in the table stays, and is no longer read. So a sequence holds of the windowed layers its window and what
the steps in flight write, however long it is. A prefix hit of n tokens needs the other layers' blocks of all n,
and the windowed layers' blocks of the last `window` tokens only.

No sequence goes back behind what it committed, so what was committed says what may be given back: a step in
flight begins there or later. That a runner has blocks for the windows of all its rows, and for the steps in
flight, is its own business (Capabilities.max_rows): where it has fewer, sequences are preempted.

The idea of groups of layers with block tables of their own, and of hits that need the last window only, is that
of vLLM's hybrid KV cache manager.
"""

from collections.abc import Sequence
from typing import NamedTuple

from localchat.backend_api.interface import Copy, MemoryOp
from localchat.core.kv_cache.manager import CacheUpdate, KVUsage, PrefixHit
from localchat.core.kv_cache.paged import PagedKVCacheManager, PagedPrefix
from localchat.core.kv_cache.prefix_tree import PrefixMatch, PrefixNode
from localchat.core.kv_cache.window_blocks import WindowBlocks

_SPARE_BLOCKS = 1
"""Kept before a window: prompts often leave the last few tokens of an earlier one out."""
_NO_WINDOW = "what its windows see was evicted to make room"


class _SequenceWindow:
    """Window blocks of a running sequence."""

    __slots__ = ("committed", "ends", "first", "leaf", "published", "table")

    def __init__(
        self, table: list[int], first: int, committed: int, ends: range, full: int
    ) -> None:
        self.table = table
        self.first = first
        """Entries of the table before it are no longer its own."""
        self.committed = committed
        self.ends = ends
        """Entries that the end of its prompt sees."""
        self.leaf: PrefixNode | None = None
        """The last node that has one of its blocks."""
        self.published = full
        """Tokens of full nodes that have theirs."""


class _WindowedPrefix(NamedTuple):
    others: PrefixHit
    """Of the other layers."""
    walk: PrefixMatch


class WindowedKVCacheManager:
    """See KVCacheManager. Counts of KVUsage are those of the layers without a window."""

    def __init__(
        self, others: PagedKVCacheManager, block_tokens: int, window_tokens: int, window_blocks: int
    ) -> None:
        """`others`: of the layers without a window, without host blocks. `window_tokens`: keys that a query
        of the windowed ones sees, its own included."""
        self._others = others
        self._size = block_tokens
        self._window = window_tokens
        self._blocks = WindowBlocks(window_blocks)
        self._running: dict[int, _SequenceWindow] = {}

    def _first_seen(self, tokens: int) -> int:
        """The first block that tokens behind so many can see."""
        return max(0, (tokens + 1 - self._window) // self._size)

    def _first_kept(self, tokens: int) -> int:
        return max(0, self._first_seen(tokens) - _SPARE_BLOCKS)

    # ------------------------------------------------------------------------ the prefix

    def find_prefix(self, tokens: Sequence[int], salt: str, exact_chunk: int = 0) -> PrefixHit:
        found = self._others.find_prefix(tokens, salt, exact_chunk)
        length = self._usable(_walk(found))
        why = found.why_missed
        if exact_chunk:
            length -= length % exact_chunk
        if length < found.cached:
            found = self._others.find_prefix(tokens[: length + 1], salt)
            why = _NO_WINDOW
            assert found.cached == length
        return PrefixHit(length, why, _WindowedPrefix(found, _walk(found)))

    def _usable(self, walk: PrefixMatch) -> int:
        """Tokens of the longest prefix whose window is there."""
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
        source = None if partial is None else blocks.find(partial)
        used = [*seen, *([] if source is None else [source])]
        if blocks.room <= sum(not blocks.holders(block) for block in used):
            return None
        update = self._others.allocate(seq, tokens, others, salt, owner)
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
        """Whether a sequence that has just taken hold of a block may write behind all that is in it."""
        return shared == len(partial.tokens) and self._blocks.holders(block) == 1

    def _start(
        self,
        seq: int,
        update: CacheUpdate,
        memory: list[MemoryOp],
        held: list[int],
        first: int,
        committed: int,
        ends: range,
    ) -> CacheUpdate:
        """Begin a sequence with these blocks from its table's entry `first` on."""
        table = [0] * first + held
        window = _SequenceWindow(table, first, committed, ends, (len(table) - 1) * self._size)
        self._running[seq] = window
        self._publish(seq, window)
        return update._replace(memory=(*update.memory, *memory), new_window_blocks=tuple(table))

    # ------------------------------------------------------------------------ running

    def slot(self, seq: int) -> int:
        return self._others.slot(seq)

    def extend(self, seq: int, tokens: int) -> CacheUpdate | None:
        table = self._running[seq].table
        missing = -(-tokens // self._size) - len(table)
        if missing > self._blocks.room:
            return None
        update = self._others.extend(seq, tokens)
        if update is None or missing <= 0:
            return update
        new = tuple(self._blocks.take() for _ in range(missing))
        table.extend(new)
        return update._replace(new_window_blocks=new)

    def commit(
        self,
        seq: int,
        tokens: Sequence[int],
        computed: int,
        earliest: int = 0,
        ahead: int = 0,
        exact: int = 0,
    ) -> CacheUpdate:
        update = self._others.commit(seq, tokens, computed, earliest, ahead, exact)
        window = self._running[seq]
        window.committed = computed
        self._publish(seq, window)
        for place in range(window.first, first := max(window.first, self._first_kept(computed))):
            self._blocks.release(window.table[place], end=place in window.ends, keep=True)
        window.first = first
        return update

    def _publish(self, seq: int, window: _SequenceWindow) -> None:
        """Make the blocks of nodes findable that became known since."""
        leaf = node = self._others.leaf(seq)
        if leaf is window.leaf:
            return
        while node is not None and node.end > window.published:
            self._blocks.name(window.table[(node.end - 1) // self._size], node)
            node = node.parent
        window.leaf = leaf
        if leaf is not None:
            window.published = leaf.end // self._size * self._size

    def checkpoint(self, seq: int) -> CacheUpdate:
        return CacheUpdate()

    def hold_state(self, seq: int) -> CacheUpdate | None:
        return CacheUpdate()

    def fork(self, seq: int, child: int) -> CacheUpdate | None:
        parent = self._running[seq]
        if not self._blocks.room or (update := self._others.fork(seq, child)) is None:
            return None
        full, part = divmod(parent.committed, self._size)
        first = self._first_seen(parent.committed)
        held = parent.table[first:full]
        for block in held:
            self._blocks.hold(block)
        last = self._blocks.take()
        memory: list[MemoryOp] = []
        if part:
            memory.append(Copy(parent.table[full], last, part, window=True))
        return self._start(
            child, update, memory, [*held, last], first, parent.committed, parent.ends
        )

    def release(self, seq: int, *, keep: bool) -> CacheUpdate:
        window = self._running.pop(seq)
        update = self._others.release(seq, keep=keep)
        for block in window.table[window.first :]:
            self._blocks.release(block, end=True, keep=keep)
        return update

    def write_behind(self) -> tuple[MemoryOp, ...]:
        return self._others.write_behind()

    @property
    def behind(self) -> bool:
        return self._others.behind

    # ------------------------------------------------------------------------ usage and integrity

    def usage(self) -> KVUsage:
        return self._others.usage()

    def never_fits(self, tokens: int) -> bool:
        return self._others.never_fits(tokens)

    def check(self) -> None:
        self._others.check()
        self._blocks.check([window.table[window.first :] for window in self._running.values()])
        for seq, window in self._running.items():
            assert window.first <= self._first_seen(window.committed), f"sequence {seq} is blind"


def _walk(hit: PrefixHit) -> PrefixMatch:
    assert isinstance(hit.source, PagedPrefix)
    return hit.source.walk
