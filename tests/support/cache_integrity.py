"""Integrity of KV cache managers: every invariant of their private records, checked from outside.

Each function raises AssertionError that names the fault.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from localchat.core.kv_cache import prefix_tree
from localchat.core.kv_cache.host_blocks import HostBlocks
from localchat.core.kv_cache.host_cache import HostCache
from localchat.core.kv_cache.manager import KVCacheManager
from localchat.core.kv_cache.paged import PagedKVCacheManager
from localchat.core.kv_cache.paged_states import HybridKVCacheManager
from localchat.core.kv_cache.paged_windows import WindowedKVCacheManager
from localchat.core.kv_cache.prefix_tree import PrefixNode, PrefixTree
from localchat.core.kv_cache.slot_cells import Cells
from localchat.core.kv_cache.slots import SlotKVCacheManager
from localchat.core.kv_cache.window_blocks import WindowBlocks


def check(cache: KVCacheManager) -> None:
    """Check a manager of any kind."""
    match cache:
        case SlotKVCacheManager():
            _check_slots(cache)
        case PagedKVCacheManager():
            _check_pages(cache)
        case HybridKVCacheManager():
            _check_states(cache)
        case WindowedKVCacheManager():
            _check_windows(cache)
        case _:
            raise TypeError(f"no checks for {type(cache).__name__}")


def _check_slots(cache: SlotKVCacheManager) -> None:
    check_cells(cache._cells)
    _check_host_cache(cache._host_cache)
    assert not (cache._idle and cache._running), "an idle entry beside running ones"
    holders = [*cache._running.values(), *([cache._idle] if cache._idle else [])]
    held_slots = [entry.rewind_slot for entry in holders if entry.rewind_slot >= 0]
    slots = [*cache._slots, *(entry.slot for entry in holders), *held_slots]
    assert sorted(slots) == list(range(cache._can.max_slots)), "a slot is lost or held twice"
    assert not any(cache._cells.used_by(slot) for slot in cache._slots), "an empty slot holds cells"
    for entry in holders:
        cells = cache._cells.used_by(entry.slot)
        assert len(entry.prefix) <= cells, f"slot {entry.slot}: more tokens than cells"
        assert cache._can.rewind == "last_n" or not entry.earliest, "a window without a window"
        assert entry is not cache._idle or len(entry.prefix) == cells, "an idle entry has room"


def _check_pages(cache: PagedKVCacheManager) -> None:
    refs = Counter(block for sequence in cache._sequences.values() for block in sequence.table)
    for block, count in enumerate(cache._refs):
        assert count == refs[block], f"block {block}: {count} references, {refs[block]} holders"
    assert cache._shared == sum(count > 1 for count in cache._refs), "shared blocks are off"
    live = {block for block, count in enumerate(cache._refs) if count}
    parts = [*cache._free, *cache._cached, *live]
    assert sorted(parts) == list(range(len(cache._refs))), "a block is lost or in two places"
    slots = [*cache._slots, *(sequence.slot for sequence in cache._sequences.values())]
    assert sorted(slots) == list(range(cache._max_slots)), "a slot is lost or held twice"
    _check_nodes(cache, live)


def _check_nodes(cache: PagedKVCacheManager, live: set[int]) -> None:
    _check_tree(cache._tree, Counter(sequence.salt for sequence in cache._sequences.values()))
    order = {block: age for age, block in enumerate(cache._cached)}
    copies = {block: node for node in _nodes(cache._tree) for block in node.blocks}
    hosted = [node for node in _nodes(cache._tree) if node.host >= 0]
    _check_host_blocks(cache._host, hosted, cache._reserved)
    assert cache._swapped == sum(not node.blocks for node in hosted), "swapped nodes are off"
    assert not cache._memory, "operations that were not returned"
    assert all(node.blocks and node.host < 0 for node in cache._unsaved), "nothing to save"
    assert copies == cache._node_of, "blocks and nodes do not name each other"
    assert order.keys() <= copies.keys(), "a cached block without tokens"
    for block, node in copies.items():
        assert block in order or block in live, f"block {block} has tokens and is free"
        above = node.parent.blocks if node.parent else []
        assert above or not (node.parent and node.parent.parent), "a gap on the device"
        assert block not in order or len(node.blocks) == 1, "a cached copy next to another"
        if block in order and above and above[0] in order:
            assert order[block] < order[above[0]], "a block would go before its continuation"
        if block in live and above:
            assert live.issuperset(above), "live tokens after tokens that no sequence holds"
    for seq, sequence in cache._sequences.items():
        size = cache._block_tokens
        assert sequence.committed <= len(sequence.table) * size, f"sequence {seq} outgrew its table"
        if sequence.tip is not None:
            tail = len(sequence.tail.tokens) if sequence.tail else 0
            assert sequence.tip.end + tail == sequence.committed, (
                f"sequence {seq}: tokens unpublished"
            )


def _check_states(cache: HybridKVCacheManager) -> None:
    check(cache._pages)
    held_states = sum(state.rewind_key >= 0 for state in cache._running.values())
    assert len(cache._saved) + held_states <= cache._max_states, (
        "more states are saved than there is room for"
    )
    for key, saved in cache._saved.items():
        ids = saved.prefix.ids
        assert key in cache._index.prefixes(saved.salt, ids), f"state {key} cannot be found"


def _check_windows(cache: WindowedKVCacheManager) -> None:
    check(cache._pages)
    _check_window_blocks(
        cache._blocks, [window.table[window.first :] for window in cache._running.values()]
    )
    for seq, window in cache._running.items():
        assert window.first <= cache._first_seen(window.committed), f"sequence {seq} is blind"


def check_cells(cells: Cells) -> None:
    used = {id(s): s for path in cells._paths.values() for s in path}
    for segment in used.values():
        holders = {slot for slot, path in cells._paths.items() if segment in path}
        assert segment.length > 0, "an empty segment"
        assert holders == segment.slots, f"segment of {segment.slots} lies in {holders}"
    assert cells._paths.keys() == cells._counts.keys(), "an empty slot has a path"
    for slot, path in cells._paths.items():
        assert sum(s.length for s in path) == cells._counts[slot], f"slot {slot} is miscounted"
    count = sum(segment.length for segment in used.values())
    shared = sum(segment.length for segment in used.values() if len(segment.slots) > 1)
    assert shared == cells.shared, f"{shared} cells shared, {cells.shared} counted"
    assert count + cells.free == cells.total, f"{count} cells used, {cells.free} free"


def _check_host_cache(cache: HostCache) -> None:
    states = {**cache._kept, **cache._disposable}
    sizes = [len(saved.prefix) for saved in states.values()]
    assert cache.tokens == sum(sizes), "saved tokens are miscounted"
    assert cache._bytes == sum(map(cache._size_bytes, sizes)), "saved bytes are miscounted"
    assert cache._bytes <= cache._capacity_bytes, "more is saved than there is room for"
    assert all(key == saved.key for key, saved in states.items()), (
        "a state is stored under another key"
    )
    assert all(saved.disposable == (key in cache._disposable) for key, saved in states.items())
    for key, saved in states.items():
        assert key in cache._index.prefixes(saved.salt, saved.prefix.ids), "a state is not found"


def _check_host_blocks(host: HostBlocks, nodes: list[PrefixNode], reserved: int) -> None:
    assert {node.host: node for node in nodes} == host._nodes, "host blocks are off"
    assert len(nodes) == len(host._nodes), "two nodes in one host block"
    blocks = [*host._free, *host._nodes, *host._left]
    assert len(set(blocks)) == len(blocks), "a host block is in two places"
    assert len(blocks) + reserved == host._total, "a host block is lost"
    heads = {id(node) for _, _, node in host._leaves}
    for node in nodes:
        assert node.host_children or id(node) in heads, "a host block that cannot be evicted"


def _check_tree(tree: PrefixTree, users: dict[str, int]) -> None:
    full = 0
    for node in _nodes(tree):
        parent = node.parent
        assert parent is not None
        assert node in parent.children[node.tokens[0]], "a node is not its parent's child"
        assert node.end == parent.end + len(node.tokens), "a node's end is off"
        assert node.blocks or node.host >= 0, "a node without a block"
        hosted = sum(child.host >= 0 for nodes in node.children.values() for child in nodes)
        assert node.host_children == hosted, "children in host memory are off"
        assert 0 < len(node.tokens) <= tree._block_tokens, "a node of impossible length"
        if node.digest:
            full += 1
            assert tree._full[node.digest] is node, "the hash map names another node"
            assert node.digest == prefix_tree._digest(parent, node.tokens), "a wrong digest"
        else:
            assert not node.children, "a node without a digest has children"
    assert full == len(tree._full), "the hash map holds nodes outside the tree"
    for salt, root in tree._roots.items():
        assert root.users == users.get(salt, 0), f"salt users are off: {root.users}"
        assert root.users or root.children, "an empty root was kept"
    assert not users.keys() - tree._roots.keys(), "a running sequence without a root"


def _check_window_blocks(blocks: WindowBlocks, tables: Iterable[list[int]]) -> None:
    holders = Counter(block for table in tables for block in table)
    for block, count in enumerate(blocks._refs):
        assert count == holders[block], f"window block {block}: {count} references"
    live = [block for block, count in enumerate(blocks._refs) if count]
    parts = [*blocks._free, *blocks._middles, *blocks._ends, *live]
    assert sorted(parts) == list(range(len(blocks._refs))), "a window block is lost or twice there"
    named = {block: node for node, block in blocks._block_of.items()}
    assert named == blocks._node_of, "window blocks and nodes do not name each other"
    assert blocks._node_of.keys() >= {*blocks._middles, *blocks._ends}, "a cached block has no node"
    assert not blocks._node_of.keys() & set(blocks._free), "a free window block can be found"


def _nodes(tree: PrefixTree) -> Iterator[PrefixNode]:
    """Yield every node, parents first, without the roots."""
    waiting = list(tree._roots.values())
    while waiting:
        for children in waiting.pop().children.values():
            yield from children
            waiting.extend(children)
