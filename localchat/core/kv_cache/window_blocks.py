"""Blocks of sliding-window layers: reference counts, prefix cache, eviction.

A released block stays in the cache until its room is needed. Blocks from the middle of texts are evicted first.
Blocks at the end of a prompt or an answer go last, because later texts continue there. Within each group the
least recently used goes first.
"""

from collections import OrderedDict

from localchat.core.kv_cache.prefix_tree import PrefixNode


class WindowBlocks:
    """All blocks of the windowed layers of one runner. Used by a single thread."""

    def __init__(self, blocks: int) -> None:
        self._refs = [0] * blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._middles: OrderedDict[int, None] = OrderedDict()
        self._ends: OrderedDict[int, None] = OrderedDict()
        self._node_of: dict[int, PrefixNode] = {}
        self._block_of: dict[PrefixNode, int] = {}

    @property
    def room(self) -> int:
        """Number of blocks that no sequence holds."""
        return len(self._free) + len(self._middles) + len(self._ends)

    def holders(self, block: int) -> int:
        """Return the number of sequences that hold a block."""
        return self._refs[block]

    def find(self, node: PrefixNode) -> int | None:
        """Return the block with the tokens of a node, if there is one."""
        return self._block_of.get(node)

    def hold(self, block: int) -> None:
        """Add a holder to a block."""
        self._refs[block] += 1
        self._ends.pop(block, None)
        self._middles.pop(block, None)

    def take(self) -> int:
        """Return a block for new tokens. The caller checked `room`."""
        if not self._free:
            block, _ = (self._middles or self._ends).popitem(last=False)
            self.forget(block)
            self._free.append(block)
        block = self._free.pop()
        self._refs[block] = 1
        return block

    def name(self, block: int, node: PrefixNode) -> None:
        """Make a held block findable by a node, unless another held block already is."""
        if self._node_of.get(block) is node:
            return
        self.forget(block)
        other = self._block_of.get(node)
        if other is not None:
            if self._refs[other]:
                return
            self.forget(other)
            self.hold(other)
            self.release(other, end=False, keep=False)
        self._node_of[block] = node
        self._block_of[node] = block

    def forget(self, block: int) -> None:
        """Remove a block from the prefix cache."""
        node = self._node_of.pop(block, None)
        if node is not None:
            del self._block_of[node]

    def release(self, block: int, *, end: bool, keep: bool) -> None:
        """Release a block. `end`: later texts are likely to continue after it.

        `keep`: it stays in the prefix cache. It also stays if a sequence kept its node.
        """
        self._refs[block] -= 1
        if self._refs[block]:
            return
        node = self._node_of.get(block)
        if node is not None and (keep or node.kept):
            cached = self._ends if end else self._middles
            cached[block] = None
            return
        self.forget(block)
        self._free.append(block)
