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
        """Its last published full node; None once its tokens can no longer be published (digest collision)."""
        self.tail: PrefixNode | None = None
        """Its partly filled node."""
        self.owner = owner
        """Conversation for which its blocks may go to the disk; empty: they may not."""
        self.noted: PrefixNode | None = None
        """The last node that was noted for the disk."""
