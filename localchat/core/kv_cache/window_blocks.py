"""Blocks of windowed layers: who holds them, which text each is of, and which goes first.

A block that its last sequence gave back stays findable until its room is needed. The first to go are those from
the middle of texts, then those before an end, of a prompt or an answer, where later texts go on; among them the
least recently used.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable

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
        """Blocks that nobody holds."""
        return len(self._free) + len(self._middles) + len(self._ends)

    def holders(self, block: int) -> int:
        """Sequences that hold a block."""
        return self._refs[block]

    def find(self, node: PrefixNode) -> int | None:
        """The block with the tokens of a node."""
        return self._block_of.get(node)

    def hold(self, block: int) -> None:
        """Note one more holder."""
        self._refs[block] += 1
        self._ends.pop(block, None)
        self._middles.pop(block, None)

    def take(self) -> int:
        """A block for new tokens; there is `room`."""
        if not self._free:
            block, _ = (self._middles or self._ends).popitem(last=False)
            self.forget(block)
            self._free.append(block)
        block = self._free.pop()
        self._refs[block] = 1
        return block

    def name(self, block: int, node: PrefixNode) -> None:
        """Let a held block be found by a node, unless another one that is held can be."""
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
        self._node_of[block], self._block_of[node] = node, block

    def forget(self, block: int) -> None:
        """Let a block no longer be found."""
        node = self._node_of.pop(block, None)
        if node is not None:
            del self._block_of[node]

    def release(self, block: int, *, end: bool, keep: bool) -> None:
        """Give a block back. `end`: later texts are likely to go on behind it. `keep`: it stays findable, as it
        does where a sequence kept its node."""
        self._refs[block] -= 1
        if self._refs[block]:
            return
        node = self._node_of.get(block)
        if node is not None and (keep or node.kept):
            (self._ends if end else self._middles)[block] = None
            return
        self.forget(block)
        self._free.append(block)

    def check(self, tables: Iterable[list[int]]) -> None:
        """`tables`: blocks that each sequence holds. Raises AssertionError naming the fault."""
        holders = Counter(block for table in tables for block in table)
        for block, count in enumerate(self._refs):
            assert count == holders[block], f"window block {block}: {count} references"
        live = [block for block, count in enumerate(self._refs) if count]
        parts = [*self._free, *self._middles, *self._ends, *live]
        assert sorted(parts) == list(range(len(self._refs))), (
            "a window block is lost or twice there"
        )
        named = {block: node for node, block in self._block_of.items()}
        assert named == self._node_of, "window blocks and nodes do not name each other"
        assert self._node_of.keys() >= {*self._middles, *self._ends}, "nobody can find this block"
        assert not self._node_of.keys() & set(self._free), "a free window block can be found"
