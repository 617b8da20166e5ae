"""Shared by tests: TEN, bench, start."""

from localchat.core.kv_cache.slots import SlotKVCacheManager
from tests.support.kv_cache_bench import Bench, capabilities

TEN = list(range(10))


def bench(ram: int = 10_000, worth: int = 1, **changes: object) -> Bench:
    can = capabilities(**changes)
    return Bench(SlotKVCacheManager(can, ram, min_swap_tokens=worth), can)


def start(b: Bench, tokens: list[int], salt: str = "") -> int:
    """A sequence, computed and still running."""
    seq = b.allocate(tokens, salt)
    assert seq is not None
    assert b.compute(seq)
    return seq
