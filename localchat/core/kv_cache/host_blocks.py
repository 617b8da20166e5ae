"""Blocks in host memory: the node of the prefix tree that each holds, and the order of eviction.

Texts are evicted least recently used first, each from its end: a node can go only if no successor of it is in
host memory. A block that the disk tier reads or writes outside the plans is pinned and stays where it is.
"""

import heapq
from collections import Counter
from itertools import count

from localchat.core.kv_cache.prefix_tree import PrefixNode


class HostBlocks:
    """All host blocks of one runner. Used by a single thread."""

    def __init__(self, blocks: int) -> None:
        self._total = blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._nodes: dict[int, PrefixNode] = {}
        self._leaves: list[tuple[int, int, PrefixNode]] = []
        """Heap of (last use, order, node). Entries may be outdated and are checked when popped."""
        self._order = count()
        self._uses = 0
        self._pins: Counter[int] = Counter()
        self._left: set[int] = set()
        """Pinned blocks without a node. They become free once they are unpinned."""
        self.in_plan: set[int] = set()
        """Blocks in the next plan. Until it is launched, they do not hold the bytes of their nodes."""

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def exist(self) -> bool:
        """Whether the runner has host blocks."""
        return self._total > 0

    def take(self) -> int | None:
        """Return a free block. None: one has to be evicted first."""
        if not self._free:
            return None
        return self._free.pop()

    def victim(self) -> PrefixNode | None:
        """Return the node to evict next. None: all blocks are pinned."""
        skipped: list[tuple[int, int, PrefixNode]] = []
        victim: PrefixNode | None = None
        while self._leaves and victim is None:
            entry = heapq.heappop(self._leaves)
            last_use, _, node = entry
            if node.host < 0 or node.host_children:
                continue  # It is pushed again once it is a leaf.
            if last_use != node.last_use:
                self._push(node)
            elif self._pins[node.host]:
                skipped.append(entry)
            else:
                victim = node
                skipped.append(entry)
        for entry in skipped:
            heapq.heappush(self._leaves, entry)
        return victim

    def put(self, node: PrefixNode, number: int) -> None:
        """Record that a block holds a node from now on."""
        assert node.host < 0
        node.host = number
        self._nodes[number] = node
        if node.parent is not None:
            node.parent.host_children += 1
        self.touch([node])
        self._push(node)

    def drop(self, node: PrefixNode) -> None:
        """Give a node's block back."""
        number = node.host
        node.host = -1
        del self._nodes[number]
        parent = node.parent
        assert parent is not None
        parent.host_children -= 1
        if parent.host >= 0 and not parent.host_children:
            self._push(parent)
        self.give_back(number)

    def give_back(self, number: int) -> None:
        """Free a block that holds no node."""
        if self._pins[number]:
            self._left.add(number)
        else:
            self._free.append(number)

    def _push(self, node: PrefixNode) -> None:
        heapq.heappush(self._leaves, (node.last_use, next(self._order), node))

    def touch(self, nodes: list[PrefixNode]) -> None:
        """Mark the nodes of one text as used now."""
        self._uses += 1
        for node in nodes:
            node.last_use = self._uses

    def pin(self, number: int) -> None:
        """Protect a block's bytes until `unpin`."""
        self._pins[number] += 1

    def unpin(self, number: int) -> None:
        """See `pin`."""
        self._pins[number] -= 1
        if not self._pins[number]:
            del self._pins[number]
            if number in self._left:
                self._left.remove(number)
                self._free.append(number)
