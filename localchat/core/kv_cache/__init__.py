"""Books of the KV cache: which text lies where, who shares it, what is forgotten first."""

from localchat.backend_api.interface import Capabilities
from localchat.core.kv_cache.manager import KVCacheManager
from localchat.core.kv_cache.paged import PagedKVCacheManager
from localchat.core.kv_cache.slots import SlotKVCacheManager

__all__ = ["KVCacheManager", "make_kv_cache_manager"]


def make_kv_cache_manager(
    capabilities: Capabilities, identity: str, cache_ram_bytes: int
) -> KVCacheManager:
    """The books of a loaded model, empty. `identity` names its weights (`ModelInfo.identity`);
    `cache_ram_bytes` bounds what an unpaged cache parks in RAM."""
    can = capabilities
    if not can.block_tokens:
        return SlotKVCacheManager(can, cache_ram_bytes)
    blocks = can.kv_tokens // can.block_tokens
    return PagedKVCacheManager(can.block_tokens, blocks, can.max_slots, f"{identity} {can.kv_type}")
