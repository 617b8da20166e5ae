"""Books of the KV cache: which text lies where, who shares it, what is forgotten first."""

from localchat.loop.backend import Capabilities
from localchat.loop.kv.blocks import BlocksBook
from localchat.loop.kv.book import Book
from localchat.loop.kv.slots import SlotsBook

__all__ = ["Book", "open_book"]


def open_book(capabilities: Capabilities, identity: str, cache_ram_bytes: int) -> Book:
    """The books of a loaded model, empty. `identity` names its weights (`ModelInfo.identity`);
    `cache_ram_bytes` bounds what an unpaged cache parks in RAM."""
    can = capabilities
    if not can.block_tokens:
        return SlotsBook(can, cache_ram_bytes)
    blocks = can.kv_tokens // can.block_tokens
    return BlocksBook(can.block_tokens, blocks, can.max_slots, f"{identity} {can.kv_type}")
