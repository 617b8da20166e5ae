"""Blocks in host memory: which node of the prefix tree lies where, and which goes first.

A text is evicted from its end, the least recently used one first: only a node without a successor in host
memory goes, and then the one before it may. A block that is being read or written outside the plans (by the
disk tier) is pinned and stays where it is.
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
        """Heap of (last use, order, node). An entry may be out of date: it is checked when it is taken."""
        self._order = count()
        self._uses = 0
        self._pins: Counter[int] = Counter()
        self._left: set[int] = set()
        """Pinned blocks whose node is gone: free once they are no longer pinned."""
        self.in_plan: set[int] = set()
        """Blocks that the next plan names: until it is launched, their bytes are not what the books say."""

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def exist(self) -> bool:
        """Whether there are any."""
        return self._total > 0

    # ------------------------------------------------------------------------ taking and giving back

    def take(self) -> int | None:
        """A free block; None: one has to be evicted first."""
        return self._free.pop() if self._free else None

    def victim(self) -> PrefixNode | None:
        """The node whose block is of the least use; None: all are pinned."""
        aside: list[tuple[int, int, PrefixNode]] = []
        found: PrefixNode | None = None
        while self._leaves and found is None:
            entry = heapq.heappop(self._leaves)
            last_use, _, node = entry
            if node.host < 0 or node.host_children:
                continue  # it comes back once it is a leaf again
            if last_use != node.last_use:
                self._push(node)
            elif self._pins[node.host]:
                aside.append(entry)
            else:
                found = node
                aside.append(entry)
        for entry in aside:
            heapq.heappush(self._leaves, entry)
        return found

    def put(self, node: PrefixNode, number: int) -> None:
        """Note that a block holds a node from now on."""
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

    # ------------------------------------------------------------------------ pins

    def pin(self, number: int) -> None:
        """Keep a block's bytes until `unpin`."""
        self._pins[number] += 1

    def unpin(self, number: int) -> None:
        """See `pin`."""
        self._pins[number] -= 1
        if not self._pins[number]:
            del self._pins[number]
            if number in self._left:
                self._left.remove(number)
                self._free.append(number)

    def pinned(self, number: int) -> bool:
        """Whether a block's bytes are in use outside the plans."""
        return self._pins[number] > 0

    # ------------------------------------------------------------------------ integrity

    def check(self, nodes: list[PrefixNode], reserved: int) -> None:
        """`nodes`: those of the tree in host memory. `reserved`: blocks taken that hold no node yet."""
        assert {node.host: node for node in nodes} == self._nodes, "host blocks are off"
        assert len(nodes) == len(self._nodes), "two nodes in one host block"
        taken = [*self._free, *self._nodes, *self._left]
        assert len(set(taken)) == len(taken), "a host block is in two places"
        assert len(taken) + reserved == self._total, "a host block is lost"
        heads = {id(node) for _, _, node in self._leaves}
        for node in nodes:
            assert node.host_children or id(node) in heads, "a host block that cannot be evicted"
