"""Paged KV cache (the CUDA runner): blocks, reference counts, prefix cache, eviction.

A block is *live* (held by running sequences), *cached* (held by none, its tokens findable) or *free*. Cached
blocks are evicted least recently used first. A sequence releases its blocks from the last to the first, so a
leaf is always evicted before the blocks that it continues, never a block in the middle of a prefix. A partly
shared block is copied (`Copy`), or reused if no other sequence needs it. A fork is the same operation.

If the runner has host blocks, full blocks are also saved in host memory, a few with each plan, and at the
latest when they are evicted from the device. A hit may then end in host blocks, which are loaded into new
blocks. So a preempted sequence is copied back instead of computed again. The device holds each text from its
start, and host memory continues it without a gap.

Ideas: vLLM's block manager (chained hashes, reverse release), exllamav3's eviction (leaf first), SGLang's
hierarchical cache (written through to the host).
"""

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from math import lcm
from typing import NamedTuple

from localchat.backend_api.interface import Copy, LoadBlock, MemoryOp, SaveBlock
from localchat.core.kv_cache.host_blocks import HostBlocks
from localchat.core.kv_cache.manager import (
    CacheUpdate,
    KVCacheManager,
    KVUsage,
    PrefixHit,
    ValidTokens,
)
from localchat.core.kv_cache.prefix_tree import (
    PrefixMatch,
    PrefixNode,
    PrefixTree,
    TokenArray,
    path_to,
)

_SAVES_PER_PLAN = 16
"""More would delay a load in the next plan. 16 blocks of a 7B model take 1 ms."""


class PagedPrefix(NamedTuple):
    """Source of a hit."""

    version: int
    walk: PrefixMatch


@dataclass(slots=True, eq=False)
class _SequenceBlocks:
    """Blocks of a running sequence."""

    slot: int
    salt: str
    table: list[int]
    committed: int
    tip: PrefixNode | None
    """Last published full node. None once its tokens cannot be published (digest collision)."""
    owner: str = ""
    """Conversation for which the blocks may go to the disk. Empty: they may not."""
    exact: int = 0
    """Leading tokens whose KV has the bits of a fresh computation."""
    tail: PrefixNode | None = None
    """Partly filled node."""
    noted: PrefixNode | None = None
    """Last node that was noted for the disk."""


class PagedKVCacheManager(KVCacheManager):
    """See KVCacheManager. Counts of KVUsage are blocks times `block_tokens`."""

    def __init__(
        self, block_tokens: int, blocks: int, max_slots: int, identity: str, host_blocks: int = 0
    ) -> None:
        """`identity` names everything besides the tokens that KV depends on (weights, KV type).

        It is hashed with every prefix.
        """
        self._block_tokens = block_tokens
        self._refs = [0] * blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._node_of: dict[int, PrefixNode] = {}
        self._tree = PrefixTree(block_tokens, identity)
        self._sequences: dict[int, _SequenceBlocks] = {}
        self._slots = list(range(max_slots))
        self._max_slots = max_slots
        self._host = HostBlocks(host_blocks)
        self._unsaved: dict[PrefixNode, None] = {}
        """Full blocks that are only on the device, in the order of their computation."""
        self._host_full = False
        """Every host block is pinned or reserved."""
        self._swapped = 0
        """Number of nodes that are only in host memory."""
        self._reserved = 0
        """Number of host blocks that are being filled from the disk."""
        self.stored_from = 0
        """Length from which a text may go to the disk. 0: there is no disk tier."""
        self.unstored: dict[tuple[PrefixNode, str], int] = {}
        """Tokens already passed to the disk writer, by last node and owner of the text.

        The disk tier removes the entries.
        """
        self._memory: list[MemoryOp] = []
        """Operations of the current change."""
        self._shared = 0
        self._evictions = 0
        self._version = 0

    def find_prefix(self, tokens: Sequence[int], salt: str, exact_chunk: int = 0) -> PrefixHit:
        limit = len(tokens) - 1
        walk = self._tree.match(array("i", tokens), limit, salt)
        if exact_chunk:
            exact = sum(1 for _ in takewhile(lambda node: node.exact, walk.nodes))
            chunk = lcm(exact_chunk, self._block_tokens)
            limit = exact * self._block_tokens // chunk * chunk
            walk = self._tree.match(array("i", tokens), limit, salt)
        cached = len(walk.nodes) * self._block_tokens + walk.shared
        why = ""
        if cached < limit:
            why = self._miss_reason(walk, cached)
        swapped = sum(not node.blocks for node in walk.nodes) * self._block_tokens
        if walk.partial is not None and not walk.partial.blocks:
            swapped += walk.shared
        return PrefixHit(cached, why, PagedPrefix(self._version, walk), swapped)

    def _miss_reason(self, walk: PrefixMatch, cached: int) -> str:
        if walk.was_known:
            return "evicted to make room"
        if walk.partial is not None:
            differs = walk.shared < len(walk.partial.tokens)
        else:
            node = walk.nodes[-1] if walk.nodes else walk.root
            differs = node is not None and bool(node.children)
        if cached and differs:
            return f"the text differs from token {cached + 1} on"
        return ""

    def allocate(
        self, seq: int, tokens: Sequence[int], hit: PrefixHit, salt: str, owner: str = ""
    ) -> CacheUpdate | None:
        assert seq not in self._sequences, f"sequence {seq} is already allocated"
        assert isinstance(hit.source, PagedPrefix)
        assert hit.source.version == self._version, "the hit is older than the last change"
        nodes, partial, shared, _, _ = hit.source.walk
        resident = [node.blocks[0] for node in nodes if node.blocks]
        missing = nodes[len(resident) :]
        room = len(self._free) + len(self._cached) - sum(not self._refs[b] for b in resident)
        reuse = False
        if partial is not None and partial.blocks and not self._refs[partial.blocks[0]]:
            room -= 1
            reuse = room < 1 or shared == len(partial.tokens)
        if not self._slots or (room < len(missing) + 1 and not reuse):
            return None
        for block in resident:
            self._hold(block)
        self._host.touch([*nodes, partial] if partial else list(nodes))
        loaded = self._load(missing)
        last = self._last_block(partial, shared, reuse)
        root = self._tree.acquire_root(salt)
        table = [*resident, *loaded, last]
        sequence = _SequenceBlocks(
            heapq.heappop(self._slots), salt, table, hit.cached, nodes[-1] if nodes else root, owner
        )
        self._sequences[seq] = sequence
        if shared:
            self._begin_tail(sequence, array("i", tokens[hit.cached - shared : hit.cached]))
        self._version += 1
        return CacheUpdate(self._take_memory(), tuple(table))

    def _load(self, nodes: Sequence[PrefixNode]) -> list[int]:
        """Load nodes from host memory into new blocks. Return the blocks."""
        for node in nodes:
            self._host.pin(node.host)
        blocks = []
        for node in nodes:
            block = self._take_block()
            self._add_load(node, block)
            node.blocks.append(block)
            self._node_of[block] = node
            self._swapped -= 1
            blocks.append(block)
        for node in nodes:
            self._host.unpin(node.host)
        return blocks

    def _add_load(self, node: PrefixNode, block: int) -> None:
        self._memory.append(LoadBlock(node.host, block))
        self._host.in_plan.add(node.host)

    def _take_memory(self) -> tuple[MemoryOp, ...]:
        """Return the operations of the change that is now complete."""
        memory = tuple(self._memory)
        self._memory = []
        return memory

    def _last_block(self, partial: PrefixNode | None, shared: int, reuse: bool) -> int:
        """Return the block in which a sequence continues, with `shared` tokens of `partial`."""
        if partial is None:
            return self._take_block()
        if not partial.blocks:
            self._host.pin(partial.host)
            block = self._take_block()
            self._host.unpin(partial.host)
            self._add_load(partial, block)
            return block
        source = partial.blocks[0]
        if reuse:
            # No other sequence holds the block. Either all its tokens are shared, or no other block is left.
            # In that case it has no children, because they would have been evicted before it.
            del self._cached[source]
            del self._node_of[source]
            if shared < len(partial.tokens):
                self._evict(partial, source)
            else:
                self._tree.remove(partial, evicted=False)
            self._hold(source)
            return source
        idle = not self._refs[source]
        if idle:
            del self._cached[source]
        block = self._take_block()
        if idle:
            self._cached[source] = None
        self._memory.append(Copy(source, block, shared))
        return block

    def _begin_tail(self, sequence: _SequenceBlocks, tokens: TokenArray) -> None:
        if sequence.tip is not None:
            block = sequence.table[sequence.tip.end // self._block_tokens]
            sequence.tail = self._node_of[block] = self._tree.add_partial(
                sequence.tip, tokens, block
            )

    def _hold(self, block: int) -> None:
        self._cached.pop(block, None)
        self._refs[block] += 1
        self._shared += self._refs[block] == 2

    def _take_block(self) -> int:
        """Take a block for new tokens: a free one, or else the least recently used cached one."""
        if not self._free:
            block, _ = self._cached.popitem(last=False)
            self._evict(self._node_of.pop(block), block)
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
                self._swapped += node.host >= 0
                self._forget(node, evicted=False)

    def _evict(self, node: PrefixNode, block: int) -> None:
        """Take the last block from a node. Host memory has it, gets it now, or the node is lost."""
        if self._host.exist and node.digest and node.host < 0:
            self._save(node, block)
        self._unsaved.pop(node, None)
        node.blocks.clear()
        if node.host >= 0:
            self._swapped += 1
        else:
            self._forget(node, evicted=True)

    def _forget(self, node: PrefixNode, *, evicted: bool) -> None:
        """Remove a node that left the device, with its descendants in host memory."""
        descendants = [node]
        # The list grows while it is walked, so it reaches all descendants.
        for parent in descendants:
            descendants.extend(child for children in parent.children.values() for child in children)
        for descendant in reversed(descendants):
            if descendant.host >= 0:
                self._swapped -= 1
                self._host.drop(descendant)
            self._unsaved.pop(descendant, None)
            self._tree.remove(descendant, evicted=evicted)
        if evicted:
            self._evictions += len(descendants)

    def _save(self, node: PrefixNode, block: int) -> bool:
        """Save a block in host memory. Return False if all host blocks are in use."""
        number = self._host_block()
        if number is None:
            return False
        self._memory.append(SaveBlock(block, number))
        self._host.put(node, number)
        self._host.in_plan.add(number)
        return True

    def _host_block(self) -> int | None:
        number = self._host.take()
        if number is not None:
            return number
        victim = self._host.victim()
        if victim is None:
            return None
        self._host.drop(victim)
        if not victim.blocks:
            self._swapped -= 1
            self._evictions += 1
            self._tree.remove(victim, evicted=True)
        return self._host.take()

    def write_behind(self) -> tuple[MemoryOp, ...]:
        for node in list(islice(self._unsaved, _SAVES_PER_PLAN)):
            if not self._save(node, node.blocks[0]):
                self._host_full = True
                break
            del self._unsaved[node]
        self._host.in_plan.clear()
        memory = self._take_memory()
        self._version += bool(memory)
        return memory

    @property
    def behind(self) -> bool:
        return bool(self._unsaved) and not self._host_full

    def known_blocks(
        self, tokens: Sequence[int], salt: str, *, exact: bool = False
    ) -> tuple[int, bytes]:
        """Return the number of a prompt's cached full blocks, and the last one's digest.

        `exact`: only blocks with the bits of a fresh computation count.
        """
        nodes = self._tree.match(array("i", tokens), len(tokens) - 1, salt).nodes
        if exact:
            nodes = tuple(takewhile(lambda node: node.exact, nodes))
        if not nodes:
            return 0, self._tree.root_digest(salt)
        return len(nodes), nodes[-1].digest

    def reserve(self, count: int, after: bytes, salt: str) -> list[int]:
        """Reserve up to `count` host blocks for blocks from disk after the digest `after`.

        `adopt` takes them over.
        """
        hosted = [node.host for node in path_to(self._tree.named(after, salt)) if node.host >= 0]
        for block in hosted:
            self._host.pin(block)
        numbers: list[int] = []
        in_plan: list[int] = []
        while len(numbers) < count and (number := self._host_block()) is not None:
            if number in self._host.in_plan:
                in_plan.append(number)
            else:
                numbers.append(number)
        for number in in_plan:
            self._host.give_back(number)
        for block in hosted:
            self._host.unpin(block)
        self._reserved += len(numbers)
        self._version += 1
        return numbers

    def adopt(
        self,
        after: bytes,
        salt: str,
        texts: Sequence[TokenArray],
        numbers: Sequence[int],
        exact: Sequence[bool],
    ) -> int:
        """Take over host blocks from `reserve`. Return how many are findable now.

        The first blocks hold the KV of `texts`, which follow the digest `after`. `exact`: for each text,
        whether its KV has the bits of a fresh computation.
        """
        self._reserved -= len(numbers)
        self._host_full = False
        self._version += 1
        self._tree.acquire_root(salt)
        node = self._tree.named(after, salt)
        added = list[PrefixNode]()
        left = list(numbers[len(texts) :])
        for index, (text, number) in enumerate(zip(texts, numbers, strict=False)):
            following = self._tree.add_full(node, text) if node is not None else None
            if following is None or following.host >= 0:
                left.append(number)
            else:
                self._unsaved.pop(following, None)
                self._swapped += not following.blocks
                following.kept = True
                following.exact = exact[index] and (following.exact or not following.blocks)
                self._host.put(following, number)
            if following is not None:
                added.append(following)
            node = following
        for number in left:
            self._host.give_back(number)
        if added:
            self._host.touch(path_to(added[-1]))
        self._tree.release_root(salt)
        return len(added)

    def load_ahead(self, last: bytes, salt: str) -> tuple[MemoryOp, ...]:
        """Load a text up to the digest `last` from host memory into unused blocks.

        Loads as many blocks as there is room for.
        """
        nodes = path_to(self._tree.named(last, salt))
        table = [node.blocks[0] for node in nodes if node.blocks]
        room = len(self._free) + len(self._cached) - sum(not self._refs[block] for block in table)
        missing = nodes[len(table) :][:room]
        for block in table:
            self._hold(block)
        table += self._load(missing)
        for block in reversed(table):
            # The blocks stay cached, because all their nodes are marked as kept.
            self._release_block(block, keep=False)
        self._version += 1
        return self._take_memory()

    def pin_saved(self, node: PrefixNode) -> bool:
        """Pin a node's host block. Return False if it has none yet, or its copy is not launched."""
        if node.host < 0:
            self._unsaved[node] = None
            return False
        if node.host in self._host.in_plan:
            return False
        self._host.pin(node.host)
        return True

    def unpin(self, number: int) -> None:
        """Undo `pin_saved`."""
        self._host.unpin(number)
        self._host_full = False

    def slot(self, seq: int) -> int:
        return self._sequences[seq].slot

    def leaf(self, seq: int) -> PrefixNode | None:
        """Return the last node of a sequence's text, or the root. None: the text is not published."""
        sequence = self._sequences[seq]
        return sequence.tail or sequence.tip

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
        return CacheUpdate(self._take_memory(), new)

    def commit(self, seq: int, tokens: Sequence[int], valid: ValidTokens) -> CacheUpdate:
        sequence = self._sequences[seq]
        computed = valid.computed
        assert sequence.committed <= computed <= len(sequence.table) * self._block_tokens, (
            f"sequence {seq}: {computed} tokens computed, {sequence.committed} were before"
        )
        before = sequence.committed
        sequence.exact = max(sequence.exact, valid.exact)
        while sequence.committed < computed:
            end = min(computed, (sequence.committed // self._block_tokens + 1) * self._block_tokens)
            self._publish(sequence, array("i", tokens[sequence.committed : end]))
            sequence.committed = end
            self._version += 1
        if computed - before == 1:
            # A token was sampled after it, so the KV is valid.
            self._note_unstored(sequence)
        return CacheUpdate()

    def _note_unstored(self, sequence: _SequenceBlocks) -> None:
        """Record the blocks of a sequence that have to go to the disk."""
        tip = sequence.tip
        owner = sequence.owner
        noted = sequence.noted
        if not (self.stored_from and owner and tip) or tip.end < self.stored_from or tip is noted:
            return
        done = 0
        if noted is not None:
            done = self.unstored.pop((noted, owner), noted.end)
        self.unstored.setdefault((tip, owner), done)
        sequence.noted = tip

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
        exact = sequence.exact >= tail.end
        sequence.tip = self._tree.complete(tail)
        sequence.tail = None
        if sequence.tip is None:
            del self._node_of[block]
        elif sequence.tip is not tail:
            self._node_of[block] = sequence.tip
            self._swapped -= len(sequence.tip.blocks) == 1
            self._free_cached_copies(sequence.tip)
            if exact and not sequence.tip.exact and sequence.tip.host >= 0:
                # The copy in host memory has other bits, so it is saved again.
                self._host.drop(sequence.tip)
            sequence.tip.exact = exact and (len(sequence.tip.blocks) == 1 or sequence.tip.exact)
        else:
            tail.exact = exact
        if self._host.exist and sequence.tip is not None and sequence.tip.host < 0:
            self._unsaved[sequence.tip] = None

    def _free_cached_copies(self, node: PrefixNode) -> None:
        """Free the cached copies of a node. They are redundant beside a live copy."""
        for block in [b for b in node.blocks if b in self._cached]:
            node.blocks.remove(block)
            del self._cached[block]
            del self._node_of[block]
            self._free.append(block)

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
        if part:
            self._memory.append(Copy(sequence.table[full], block, part))
        return CacheUpdate(self._take_memory(), tuple(table))

    def release(self, seq: int, *, keep: bool) -> CacheUpdate:
        sequence = self._sequences.pop(seq)
        if keep:
            self._note_unstored(sequence)
        for block in reversed(sequence.table):
            self._release_block(block, keep)
        if self._host.exist:
            self._host.touch(path_to(sequence.tip))
        self._tree.release_root(sequence.salt)
        heapq.heappush(self._slots, sequence.slot)
        self._version += 1
        return CacheUpdate()

    def usage(self) -> KVUsage:
        size = self._block_tokens
        total = len(self._refs)
        cached = len(self._cached)
        free = len(self._free)
        live = total - cached - free
        return KVUsage(
            live=live * size,
            shared=self._shared * size,
            cached=cached * size,
            swapped=self._swapped * size,
            free=free * size,
            total=total * size,
            evictions=self._evictions,
        )

    def never_fits(self, tokens: int) -> bool:
        return tokens > len(self._refs) * self._block_tokens


class ExtendedKVCacheManager(KVCacheManager):
    """Base of the managers that add something to the blocks of another one."""

    def __init__(self, pages: PagedKVCacheManager) -> None:
        self._pages = pages

    def slot(self, seq: int) -> int:
        return self._pages.slot(seq)

    def write_behind(self) -> tuple[MemoryOp, ...]:
        return self._pages.write_behind()

    @property
    def behind(self) -> bool:
        return self._pages.behind

    def usage(self) -> KVUsage:
        return self._pages.usage()

    def never_fits(self, tokens: int) -> bool:
        return self._pages.never_fits(tokens)
