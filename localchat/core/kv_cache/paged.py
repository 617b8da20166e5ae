"""Paged KV cache (the CUDA runner): blocks, reference counts, prefix cache, eviction.

A block is *live* (held by running sequences), *cached* (held by none, its tokens findable) or *free*. Cached
blocks are evicted least recently used first. A sequence releases its blocks from the last to the first, so a
leaf is always evicted before the blocks that it continues, never a block in the middle of a prefix. A partly
shared block is copied (`Copy`), or reused where nobody else needs it; a fork is the same operation. Ideas:
vLLM's block manager (chained hashes, reverse release), exllamav3's eviction (leaf first).
"""

import heapq
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from localchat.backend_api.interface import Copy, MemoryOp
from localchat.core.kv_cache.manager import CacheUpdate, KVUsage, PrefixHit
from localchat.core.kv_cache.prefix_tree import PrefixMatch, PrefixNode, PrefixTree, TokenArray


class _SequenceBlocks:
    """Blocks of a running sequence."""

    __slots__ = ("committed", "salt", "slot", "table", "tail", "tip")

    def __init__(
        self, slot: int, salt: str, table: list[int], committed: int, tip: PrefixNode | None
    ) -> None:
        self.slot = slot
        self.salt = salt
        self.table = table
        self.committed = committed
        self.tip = tip
        """Its last published full node; None once its tokens can no longer be published (digest collision)."""
        self.tail: PrefixNode | None = None
        """Its partly filled node."""


class _PagedPrefix(NamedTuple):
    version: int
    walk: PrefixMatch


class PagedKVCacheManager:
    """See KVCacheManager. Counts of KVUsage are blocks times `block_tokens`."""

    def __init__(self, block_tokens: int, blocks: int, max_slots: int, identity: str) -> None:
        """`identity` names everything besides the tokens that KV depends on (weights, KV type); it is
        hashed with every prefix."""
        self._block_tokens = block_tokens
        self._refs = [0] * blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._node_of: dict[int, PrefixNode] = {}
        self._tree = PrefixTree(block_tokens, identity)
        self._sequences: dict[int, _SequenceBlocks] = {}
        self._slots = list(range(max_slots))
        self._max_slots = max_slots
        self._shared = 0
        self._evictions = 0
        self._version = 0

    # ------------------------------------------------------------------------ the prefix

    def find_prefix(self, tokens: Sequence[int], salt: str) -> PrefixHit:
        limit = len(tokens) - 1
        walk = self._tree.match(array("i", tokens), limit, salt)
        cached = len(walk.nodes) * self._block_tokens + walk.shared
        why = "" if cached >= limit else self._miss_reason(walk, cached)
        return PrefixHit(cached, why, _PagedPrefix(self._version, walk))

    def _miss_reason(self, walk: PrefixMatch, cached: int) -> str:
        if walk.was_known:
            return "evicted to make room"
        node = walk.nodes[-1] if walk.nodes else walk.root
        parts = walk.shared < len(walk.partial.tokens) if walk.partial else node and node.children
        return f"the text differs from token {cached + 1} on" if cached and parts else ""

    def allocate(
        self, seq: int, tokens: Sequence[int], hit: PrefixHit, salt: str, owner: str = ""
    ) -> CacheUpdate | None:
        assert seq not in self._sequences, f"sequence {seq} is already allocated"
        assert isinstance(hit.source, _PagedPrefix)
        assert hit.source.version == self._version, "the hit is older than the last change"
        nodes, partial, shared, _, _ = hit.source.walk
        blocks = [node.blocks[0] for node in nodes]
        room = len(self._free) + len(self._cached) - sum(not self._refs[b] for b in blocks)
        reuse = False
        if partial is not None and not self._refs[partial.blocks[0]]:
            room -= 1
            reuse = room < 1 or shared == len(partial.tokens)
        if not self._slots or (room < 1 and not reuse):
            return None
        for block in blocks:
            self._hold(block)
        last, memory = self._last_block(partial, shared, reuse)
        root = self._tree.acquire_root(salt)
        table = [*blocks, last]
        sequence = _SequenceBlocks(
            heapq.heappop(self._slots), salt, table, hit.cached, nodes[-1] if nodes else root
        )
        self._sequences[seq] = sequence
        if shared:
            self._begin_tail(sequence, array("i", tokens[hit.cached - shared : hit.cached]))
        self._version += 1
        return CacheUpdate(memory, tuple(table))

    def _last_block(
        self, partial: PrefixNode | None, shared: int, reuse: bool
    ) -> tuple[int, tuple[MemoryOp, ...]]:
        """Choose the block that a sequence continues in, with `shared` tokens of `partial` in it."""
        if partial is None:
            return self._take_block(), ()
        source = partial.blocks[0]
        if reuse:
            # Nobody else holds it, and either all its tokens are shared or there is no other block
            # left (then it has no children: they would have been evicted before it).
            del self._cached[source], self._node_of[source]
            self._tree.remove(partial, evicted=shared < len(partial.tokens))
            self._evictions += shared < len(partial.tokens)
            self._hold(source)
            return source, ()
        idle = not self._refs[source]
        if idle:
            del self._cached[source]
        block = self._take_block()
        if idle:
            self._cached[source] = None
        return block, (Copy(source, block, shared),)

    def _begin_tail(self, sequence: _SequenceBlocks, tokens: TokenArray) -> None:
        if sequence.tip is not None:
            block = sequence.table[sequence.tip.end // self._block_tokens]
            sequence.tail = self._node_of[block] = self._tree.add_partial(
                sequence.tip, tokens, block
            )

    # ------------------------------------------------------------------------ blocks

    def _hold(self, block: int) -> None:
        self._cached.pop(block, None)
        self._refs[block] += 1
        self._shared += self._refs[block] == 2

    def _take_block(self) -> int:
        """Take a block for new tokens: a free one, else the least recently used cached one."""
        if not self._free:
            block, _ = self._cached.popitem(last=False)
            self._tree.remove(self._node_of.pop(block), evicted=True)
            self._evictions += 1
            self._free.append(block)
        block = self._free.pop()
        self._hold(block)
        return block

    def _release_block(self, block: int, keep: bool) -> None:
        node = self._node_of.get(block)
        if node is not None:
            node.kept |= keep
        self._refs[block] -= 1
        self._shared -= self._refs[block] == 1
        if self._refs[block]:
            return
        if node is not None and node.kept and len(node.blocks) == 1:
            self._cached[block] = None
            return
        self._free.append(block)
        if node is not None:
            del self._node_of[block]
            node.blocks.remove(block)
            if not node.blocks:
                self._tree.remove(node, evicted=False)

    # ------------------------------------------------------------------------ running

    def slot(self, seq: int) -> int:
        return self._sequences[seq].slot

    def extend(self, seq: int, tokens: int) -> CacheUpdate | None:
        sequence = self._sequences[seq]
        missing = -(-tokens // self._block_tokens) - len(sequence.table)
        if missing <= 0:
            return CacheUpdate()
        if missing > len(self._free) + len(self._cached):
            return None
        new = tuple(self._take_block() for _ in range(missing))
        sequence.table.extend(new)
        self._version += 1
        return CacheUpdate(new_blocks=new)

    def commit(
        self, seq: int, tokens: Sequence[int], computed: int, earliest: int = 0
    ) -> CacheUpdate:
        sequence = self._sequences[seq]
        assert sequence.committed <= computed <= len(sequence.table) * self._block_tokens, (
            f"sequence {seq}: {computed} tokens computed, {sequence.committed} were before"
        )
        while sequence.committed < computed:
            end = min(computed, (sequence.committed // self._block_tokens + 1) * self._block_tokens)
            self._publish(sequence, array("i", tokens[sequence.committed : end]))
            sequence.committed = end
            self._version += 1
        return CacheUpdate()

    def _publish(self, sequence: _SequenceBlocks, tokens: TokenArray) -> None:
        """Make more computed tokens of one block findable."""
        if sequence.tip is None:
            return
        if sequence.tail is None:
            self._begin_tail(sequence, tokens)
        else:
            self._tree.extend(sequence.tail, tokens)
        tail = sequence.tail
        assert tail is not None
        if len(tail.tokens) < self._block_tokens:
            return
        block = tail.blocks[0]
        sequence.tip = self._tree.complete(tail)
        sequence.tail = None
        if sequence.tip is None:
            del self._node_of[block]
        elif sequence.tip is not tail:
            self._node_of[block] = sequence.tip
            self._free_cached_copies(sequence.tip)

    def _free_cached_copies(self, node: PrefixNode) -> None:
        """Free the cached copies of a node's tokens: a live copy makes them needless."""
        for block in [b for b in node.blocks if b in self._cached]:
            node.blocks.remove(block)
            del self._cached[block], self._node_of[block]
            self._free.append(block)

    def hold_state(self, seq: int) -> CacheUpdate | None:
        return CacheUpdate()

    def checkpoint(self, seq: int) -> CacheUpdate:
        return CacheUpdate()

    def fork(self, seq: int, child: int) -> CacheUpdate | None:
        assert child not in self._sequences, f"sequence {child} is already allocated"
        sequence = self._sequences[seq]
        if not self._slots or not (self._free or self._cached):
            return None
        full, part = divmod(sequence.committed, self._block_tokens)
        block = self._take_block()
        table = [*sequence.table[:full], block]
        for shared in table[:-1]:
            self._hold(shared)
        self._tree.acquire_root(sequence.salt)
        other = _SequenceBlocks(
            heapq.heappop(self._slots), sequence.salt, table, sequence.committed, sequence.tip
        )
        self._sequences[child] = other
        if sequence.tail is not None:
            self._begin_tail(other, sequence.tail.tokens[:])
        self._version += 1
        memory = (Copy(sequence.table[full], block, part),) if part else ()
        return CacheUpdate(memory, tuple(table))

    def release(self, seq: int, *, keep: bool) -> CacheUpdate:
        sequence = self._sequences.pop(seq)
        for block in reversed(sequence.table):
            self._release_block(block, keep)
        self._tree.release_root(sequence.salt)
        heapq.heappush(self._slots, sequence.slot)
        self._version += 1
        return CacheUpdate()

    # ------------------------------------------------------------------------ usage and integrity

    def usage(self) -> KVUsage:
        size = self._block_tokens
        total, cached, free = len(self._refs), len(self._cached), len(self._free)
        live = total - cached - free
        return KVUsage(
            live=live * size,
            shared=self._shared * size,
            cached=cached * size,
            swapped=0,
            free=free * size,
            total=total * size,
            evictions=self._evictions,
        )

    def never_fits(self, tokens: int) -> bool:
        return tokens > len(self._refs) * self._block_tokens

    def check(self) -> None:
        refs = Counter(block for sequence in self._sequences.values() for block in sequence.table)
        for block, count in enumerate(self._refs):
            assert count == refs[block], f"block {block}: {count} references, {refs[block]} holders"
        assert self._shared == sum(count > 1 for count in self._refs), "shared blocks are off"
        live = {block for block, count in enumerate(self._refs) if count}
        parts = [*self._free, *self._cached, *live]
        assert sorted(parts) == list(range(len(self._refs))), "a block is lost or in two places"
        slots = [*self._slots, *(sequence.slot for sequence in self._sequences.values())]
        assert sorted(slots) == list(range(self._max_slots)), "a slot is lost or held twice"
        self._check_nodes(live)

    def _check_nodes(self, live: set[int]) -> None:
        self._tree.check(Counter(sequence.salt for sequence in self._sequences.values()))
        order = {block: age for age, block in enumerate(self._cached)}
        copies = {block: node for node in self._tree for block in node.blocks}
        assert copies == self._node_of, "blocks and nodes do not name each other"
        assert order.keys() <= copies.keys(), "a cached block without tokens"
        for block, node in copies.items():
            assert block in order or block in live, f"block {block} has tokens and is free"
            above = node.parent.blocks if node.parent else []
            assert block not in order or len(node.blocks) == 1, "a cached copy next to another"
            if block in order and above and above[0] in order:
                assert order[block] < order[above[0]], "a block would go before its continuation"
            if block in live and above:
                assert live.issuperset(above), "live tokens after tokens that nobody holds"
        for seq, sequence in self._sequences.items():
            size = self._block_tokens
            assert sequence.committed <= len(sequence.table) * size, (
                f"sequence {seq} outgrew its table"
            )
            if sequence.tip is not None:
                tail = len(sequence.tail.tokens) if sequence.tail else 0
                assert sequence.tip.end + tail == sequence.committed, (
                    f"sequence {seq}: tokens unpublished"
                )
