"""KV cache managers: where each prefix lies, who shares it, and what is evicted first."""

from localchat.backend_api.interface import Capabilities
from localchat.core.kv_cache.manager import KVCacheManager
from localchat.core.kv_cache.paged import PagedKVCacheManager
from localchat.core.kv_cache.paged_states import HybridKVCacheManager
from localchat.core.kv_cache.paged_windows import WindowedKVCacheManager
from localchat.core.kv_cache.slots import SlotKVCacheManager

__all__ = [
    "KVCacheManager",
    "PagedKVCacheManager",
    "SlotKVCacheManager",
    "make_kv_cache_manager",
]


def make_kv_cache_manager(
    capabilities: Capabilities, identity: str, cache_ram_bytes: int
) -> KVCacheManager:
    """Make the empty KV cache manager of a loaded model.

    `identity` names everything that decides the KV of given tokens, besides the KV type; `cache_ram_bytes`
    bounds what an unpaged cache saves in RAM.
    """
    can = capabilities
    if not can.block_tokens:
        return SlotKVCacheManager(can, cache_ram_bytes)
    blocks = can.kv_tokens // can.block_tokens
    pages = PagedKVCacheManager(
        can.block_tokens, blocks, can.max_slots, f"{identity} {can.kv_type}", can.host_blocks
    )
    if can.rewind == "checkpoint":
        return HybridKVCacheManager(pages, can.saved_states)
    if can.window_blocks:
        return WindowedKVCacheManager(pages, can.block_tokens, can.window_tokens, can.window_blocks)
    return pages
