"""Prefix tree of cached blocks, one for each salt: which block continues which, and what was evicted.

A *node* is one block of tokens after its parent's. It is named by a digest chained from H(identity, salt)
over all tokens before it, which is also the key of its entry on the disk (kv_store/entry.py). Its tokens are
compared on every hit, so a digest collision costs a miss and never a wrong answer. The last node of a running
sequence may be partly filled: it has no digest yet and is found by its first token. Two sequences that computed
the same tokens at the same time leave one node with two *copies* (blocks). The idea of chained block hashes is
vLLM's; that of finding a partly filled block by its tokens is SGLang's radix cache.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from localchat.kv_store.entry import entry_key, root_key

TokenArray: TypeAlias = "array[int]"
"""Token ids, 4 bytes each."""

_LOST_KEPT = 4096
_SIBLINGS_TRIED = 32
"""Candidates compared for a partly shared block: the newest; more would only cost time at a busy fork."""


def _digest(parent: "PrefixNode", tokens: TokenArray) -> bytes:
    """Name `tokens` behind a node."""
    return entry_key(parent.digest, parent.end, tokens.tobytes())


class PrefixNode:
    """One block of tokens."""

    __slots__ = (
        *("blocks", "children", "digest", "end", "exact", "kept", "parent", "tokens", "users"),
        *("host", "host_children", "last_use"),
    )

    def __init__(
        self, parent: "PrefixNode | None", tokens: TokenArray, digest: bytes = b""
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.digest = digest
        self.end: int = (parent.end if parent else 0) + len(tokens)
        self.blocks: list[int] = []
        self.children: dict[int, list[PrefixNode]] = {}
        self.exact = False
        """All its copies have the bits of a fresh computation."""
        self.kept = False
        """A sequence released it with `keep`."""
        self.users = 0
        """Running sequences of the salt; roots only."""
        self.host = -1
        """Its block in host memory; -1: none."""
        self.host_children = 0
        """Nodes after it that are in host memory."""
        self.last_use = 0


def path_to(node: PrefixNode | None) -> list[PrefixNode]:
    """All nodes of a text up to this one, without the root; none where there is none."""
    nodes: list[PrefixNode] = []
    while node is not None and node.parent is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]


class PrefixMatch(NamedTuple):
    """Result of a match: full nodes from the root on, then `shared` tokens of `partial`."""

    nodes: tuple[PrefixNode, ...]
    partial: PrefixNode | None
    shared: int
    was_known: bool
    """The next full block was here and was evicted."""
    root: PrefixNode | None


def common_length(a: TokenArray, b: TokenArray) -> int:
    """Length of the common prefix."""
    shared = min(len(a), len(b))
    if a[:shared] == b[:shared]:
        return shared
    return next(i for i in range(shared) if a[i] != b[i])


class PrefixTree:
    """All nodes. Blocks appear only as the copies listed in a node; who holds them is the manager's
    business."""

    def __init__(self, block_tokens: int, identity: str) -> None:
        self._block_tokens = block_tokens
        self._identity = identity
        self._roots: dict[str, PrefixNode] = {}
        self._full: dict[bytes, PrefixNode] = {}
        self._lost: OrderedDict[bytes, None] = OrderedDict()

    # ------------------------------------------------------------------------ reading

    def match(self, tokens: TokenArray, limit: int, salt: str) -> PrefixMatch:
        """Follow the first `limit` tokens as far as they are known."""
        node = root = self._roots.get(salt)
        if node is None:
            nowhere = self._new_root(salt)
            known = self._was_known(nowhere, tokens[: self._block_tokens])
            return PrefixMatch((), None, 0, known, None)
        nodes: list[PrefixNode] = []
        while node.end + self._block_tokens <= limit:
            piece = tokens[node.end : node.end + self._block_tokens]
            found = self._full.get(_digest(node, piece))
            if found is None or found.parent is not node or found.tokens != piece:
                break
            nodes.append(found)
            node = found
        rest = tokens[node.end : min(limit, node.end + self._block_tokens - 1)]
        partial, shared = self._closest(node, rest) if rest else (None, 0)
        piece = tokens[node.end : node.end + self._block_tokens]
        return PrefixMatch(tuple(nodes), partial, shared, self._was_known(node, piece), root)

    def named(self, digest: bytes, salt: str) -> PrefixNode | None:
        """The full node of this digest, or the salt's root; None: there is none."""
        root = self._roots.get(salt)
        if root is not None and root.digest == digest:
            return root
        return self._full.get(digest)

    def _closest(self, node: PrefixNode, rest: TokenArray) -> tuple[PrefixNode | None, int]:
        best: PrefixNode | None = None
        shared = 0
        for child in reversed(node.children.get(rest[0], [])[-_SIBLINGS_TRIED:]):
            tokens = child.tokens
            # Most have in common what the first has, such as a system prompt, and differ where it does.
            if shared < min(len(tokens), len(rest)) and tokens[shared] == rest[shared]:
                length = common_length(tokens, rest)
                if length > shared:
                    best = child
                    shared = length
        return best, shared

    def _was_known(self, before: PrefixNode, piece: TokenArray) -> bool:
        return len(piece) == self._block_tokens and _digest(before, piece) in self._lost

    def __iter__(self) -> Iterator[PrefixNode]:
        """Every node, parents first; roots excluded."""
        waiting = list(self._roots.values())
        while waiting:
            for children in waiting.pop().children.values():
                yield from children
                waiting.extend(children)

    # ------------------------------------------------------------------------ changing

    def _new_root(self, salt: str) -> PrefixNode:
        return PrefixNode(None, array("i"), self.root_digest(salt))

    def root_digest(self, salt: str) -> bytes:
        """What names the beginning of all texts of a salt."""
        return root_key(self._identity, salt)

    def acquire_root(self, salt: str) -> PrefixNode:
        """Get the root of a salt, and hold it until `release_root`."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = self._new_root(salt)
        root.users += 1
        return root

    def release_root(self, salt: str) -> None:
        """Note that a sequence of this salt ended; a root without nodes and users is removed."""
        root = self._roots[salt]
        root.users -= 1
        self._trim(root)

    def add_partial(self, parent: PrefixNode, tokens: TokenArray, block: int) -> PrefixNode:
        """Add a partly filled node after `parent` (at least one token), held by `block`."""
        node = PrefixNode(parent, tokens)
        node.blocks.append(block)
        parent.children.setdefault(tokens[0], []).append(node)
        return node

    def extend(self, node: PrefixNode, tokens: TokenArray) -> None:
        """Append computed tokens to a partly filled node."""
        node.tokens.extend(tokens)
        node.end += len(tokens)

    def complete(self, node: PrefixNode) -> PrefixNode | None:
        """Publish a node that became full. Returns the node that stands for its tokens from now on.

        That may be an older node, which takes its block over. None: other tokens have the same digest, and
        the node is not published.
        """
        parent = node.parent
        assert parent is not None
        assert len(node.tokens) == self._block_tokens
        digest = _digest(parent, node.tokens)
        older = self._full.get(digest)
        if older is None:
            node.digest = digest
            self._full[digest] = node
            self._lost.pop(digest, None)
            return node
        self._unlink(node, parent)
        if older.parent is not parent or older.tokens != node.tokens:
            return None
        older.kept |= node.kept
        older.blocks += node.blocks
        return older

    def add_full(self, parent: PrefixNode, tokens: TokenArray) -> PrefixNode | None:
        """The full node after `parent`, a new one if there is none. None: other tokens have its digest."""
        node = PrefixNode(parent, tokens)
        parent.children.setdefault(tokens[0], []).append(node)
        return self.complete(node)

    def remove(self, node: PrefixNode, *, evicted: bool) -> None:
        """Remove a leaf."""
        assert not node.children
        parent = node.parent
        assert parent is not None
        self._unlink(node, parent)
        if node.digest:
            del self._full[node.digest]
            if evicted:
                self._lost[node.digest] = None
                if len(self._lost) > _LOST_KEPT:
                    self._lost.popitem(last=False)
        self._trim(parent)

    def _unlink(self, node: PrefixNode, parent: PrefixNode) -> None:
        siblings = parent.children[node.tokens[0]]
        siblings.remove(node)
        if not siblings:
            del parent.children[node.tokens[0]]

    def _trim(self, root: PrefixNode) -> None:
        if root.parent is None and not root.users and not root.children:
            self._roots = {salt: node for salt, node in self._roots.items() if node is not root}

    # ------------------------------------------------------------------------ integrity

    def check(self, users: dict[str, int]) -> None:
        """`users`: running sequences per salt."""
        full = 0
        for node in self:
            parent = node.parent
            assert parent is not None
            assert node in parent.children[node.tokens[0]], "a node is not its parent's child"
            assert node.end == parent.end + len(node.tokens), "a node's end is off"
            assert node.blocks or node.host >= 0, "a node without a block"
            hosted = sum(one.host >= 0 for ones in node.children.values() for one in ones)
            assert node.host_children == hosted, "children in host memory are off"
            assert 0 < len(node.tokens) <= self._block_tokens, "a node of impossible length"
            if node.digest:
                full += 1
                assert self._full[node.digest] is node, "the hash map names another node"
                assert node.digest == _digest(parent, node.tokens), "a wrong digest"
            else:
                assert not node.children, "a node without a digest has children"
        assert full == len(self._full), "the hash map holds nodes outside the tree"
        for salt, root in self._roots.items():
            assert root.users == users.get(salt, 0), f"salt users are off: {root.users}"
            assert root.users or root.children, "an empty root was kept"
        assert not users.keys() - self._roots.keys(), "a running sequence without a root"
