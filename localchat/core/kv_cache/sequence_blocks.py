"""Blocks of one running sequence in a paged KV cache."""

from localchat.core.kv_cache.prefix_tree import PrefixNode


class SequenceBlocks:
    """Blocks of a running sequence."""

    __slots__ = ("committed", "exact", "noted", "owner", "salt", "slot", "table", "tail", "tip")

    def __init__(
        self,
        slot: int,
        salt: str,
        table: list[int],
        committed: int,
        tip: PrefixNode | None,
        owner: str = "",
    ) -> None:
        self.slot = slot
        self.salt = salt
        self.table = table
        self.committed = committed
        self.exact = 0
        """Leading tokens whose KV has the bits of a fresh computation."""
        self.tip = tip
        """Last published full node. None once its tokens cannot be published (digest collision)."""
        self.tail: PrefixNode | None = None
        """Partly filled node."""
        self.owner = owner
        """Conversation for which the blocks may go to the disk. Empty: they may not."""
        self.noted: PrefixNode | None = None
        """Last node that was noted for the disk."""
