"""Prefix tree of cached blocks for each salt, with the digests of evicted blocks.

A *node* is one block of tokens after its parent's. Its digest is chained from that of the salt
(kv_store/entry.py: root_key) over all tokens before it, and is also the key of its entry on the disk. Tokens
are compared on every hit, so a digest collision costs a miss and never a wrong answer. The last node of a
running sequence may be partly filled. It has no digest yet and is found by its first token. Two sequences
that computed the same tokens at the same time leave one node with two *copies* (blocks). Chained block hashes
follow vLLM, and partly filled blocks that are found by their tokens follow SGLang's radix cache.
"""

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from localchat.kv_store.entry import entry_key, root_key

TokenArray: TypeAlias = "array[int]"
"""Token ids, 4 bytes each."""

_LOST_KEPT = 4096
_SIBLINGS_TRIED = 32
"""Number of the newest candidates compared for a partly shared block. More cost time at a busy fork."""


def _digest(parent: "PrefixNode", tokens: TokenArray) -> bytes:
    """Return the digest of `tokens` after a node."""
    return entry_key(parent.digest, parent.end, tokens.tobytes())


@dataclass(slots=True, eq=False, repr=False)
class PrefixNode:
    """Block of tokens in the tree."""

    parent: "PrefixNode | None"
    tokens: TokenArray
    digest: bytes = b""
    end: int = field(init=False)
    blocks: list[int] = field(default_factory=list)
    children: "dict[int, list[PrefixNode]]" = field(default_factory=dict)
    exact: bool = False
    """All its copies have the bits of a fresh computation."""
    kept: bool = False
    """A sequence released it with `keep`."""
    users: int = 0
    """Running sequences of the salt. Roots only."""
    host: int = -1
    """Block in host memory. -1: none."""
    host_children: int = 0
    """Number of children in host memory."""
    last_use: int = 0

    def __post_init__(self) -> None:
        self.end = len(self.tokens)
        if self.parent is not None:
            self.end += self.parent.end


def path_to(node: PrefixNode | None) -> list[PrefixNode]:
    """Return the nodes of a text up to this one, without the root. Empty for None."""
    nodes: list[PrefixNode] = []
    while node is not None and node.parent is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]


class PrefixMatch(NamedTuple):
    """Result of a match: full nodes from the root, then `shared` tokens of `partial`."""

    nodes: tuple[PrefixNode, ...]
    partial: PrefixNode | None
    shared: int
    was_known: bool
    """The next full block was cached once and was evicted."""
    root: PrefixNode | None


def common_length(a: TokenArray, b: TokenArray) -> int:
    """Return the length of the common prefix."""
    shared = min(len(a), len(b))
    if a[:shared] == b[:shared]:
        return shared
    return next(i for i in range(shared) if a[i] != b[i])


class PrefixTree:
    """All nodes. Blocks appear only as copies of a node. The manager counts their references."""

    def __init__(self, block_tokens: int, identity: str) -> None:
        self._block_tokens = block_tokens
        self._identity = identity
        self._roots: dict[str, PrefixNode] = {}
        self._full: dict[bytes, PrefixNode] = {}
        self._lost: OrderedDict[bytes, None] = OrderedDict()

    def match(self, tokens: TokenArray, limit: int, salt: str) -> PrefixMatch:
        """Match the first `limit` tokens against the cached nodes."""
        node = root = self._roots.get(salt)
        if node is None:
            empty_root = self._new_root(salt)
            was_evicted = self._was_known(empty_root, tokens[: self._block_tokens])
            return PrefixMatch((), None, 0, was_evicted, None)
        nodes: list[PrefixNode] = []
        while node.end + self._block_tokens <= limit:
            piece = tokens[node.end : node.end + self._block_tokens]
            child = self._full.get(_digest(node, piece))
            if child is None or child.parent is not node or child.tokens != piece:
                break
            nodes.append(child)
            node = child
        tail = tokens[node.end : min(limit, node.end + self._block_tokens - 1)]
        partial, shared = None, 0
        if tail:
            partial, shared = self._closest(node, tail)
        piece = tokens[node.end : node.end + self._block_tokens]
        return PrefixMatch(tuple(nodes), partial, shared, self._was_known(node, piece), root)

    def named(self, digest: bytes, salt: str) -> PrefixNode | None:
        """Return the full node with this digest, or the salt's root. None: not cached."""
        root = self._roots.get(salt)
        if root is not None and root.digest == digest:
            return root
        return self._full.get(digest)

    def _closest(self, node: PrefixNode, tail: TokenArray) -> tuple[PrefixNode | None, int]:
        best: PrefixNode | None = None
        shared = 0
        for child in reversed(node.children.get(tail[0], [])[-_SIBLINGS_TRIED:]):
            tokens = child.tokens
            # Most share as much as the first one, such as a system prompt, and differ at the same token.
            if shared < min(len(tokens), len(tail)) and tokens[shared] == tail[shared]:
                length = common_length(tokens, tail)
                if length > shared:
                    best = child
                    shared = length
        return best, shared

    def _was_known(self, before: PrefixNode, piece: TokenArray) -> bool:
        return len(piece) == self._block_tokens and _digest(before, piece) in self._lost

    def _new_root(self, salt: str) -> PrefixNode:
        return PrefixNode(None, array("i"), self.root_digest(salt))

    def root_digest(self, salt: str) -> bytes:
        """Return the digest of a salt's root."""
        return root_key(self._identity, salt)

    def acquire_root(self, salt: str) -> PrefixNode:
        """Return the root of a salt, and hold it until `release_root`."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = self._new_root(salt)
        root.users += 1
        return root

    def release_root(self, salt: str) -> None:
        """Record that a sequence of this salt ended. Remove the root if it is unused."""
        root = self._roots[salt]
        root.users -= 1
        self._trim(root)

    def add_partial(self, parent: PrefixNode, tokens: TokenArray, block: int) -> PrefixNode:
        """Add a partly filled node after `parent`, with at least one token, in `block`."""
        node = PrefixNode(parent, tokens)
        node.blocks.append(block)
        parent.children.setdefault(tokens[0], []).append(node)
        return node

    def extend(self, node: PrefixNode, tokens: TokenArray) -> None:
        """Append computed tokens to a partly filled node."""
        node.tokens.extend(tokens)
        node.end += len(tokens)

    def complete(self, node: PrefixNode) -> PrefixNode | None:
        """Publish a node that became full. Return the node that represents its tokens from now on.

        That may be an older node, which takes over the block. None: other tokens have the same digest, so the
        node is not published.
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
        """Return the full node after `parent`, or add one. None: other tokens have its digest."""
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
