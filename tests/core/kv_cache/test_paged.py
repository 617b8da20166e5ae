"""The paged KV cache: prefixes found, blocks copied, order of eviction."""

import pytest

from localchat.backend_api.interface import Copy, LoadBlock, SaveBlock
from localchat.core.kv_cache import prefix_tree
from localchat.core.kv_cache.paged import PagedKVCacheManager
from tests.support.cache_integrity import check
from tests.support.kv_cache_bench import Bench, capabilities


def bench(blocks: int = 8, slots: int = 4) -> Bench:
    can = capabilities(kv_tokens=blocks * 4, block_tokens=4, max_slots=slots)
    return Bench(PagedKVCacheManager(4, blocks, slots, "model"), can)


def run(b: Bench, tokens: list[int], salt: str = "", *, keep: bool = True) -> None:
    """One whole sequence, computed and released."""
    seq = b.allocate(tokens, salt)
    assert seq is not None
    assert b.compute(seq)
    b.release(seq, keep=keep)


TEN = list(range(10))


def test_the_same_prompt_is_found_but_for_its_last_token() -> None:
    b = bench()
    run(b, TEN)
    hit = b.find_prefix(TEN)
    assert (hit.cached, hit.why_missed) == (9, "")


def test_a_longer_text_continues_the_partly_filled_block_in_place() -> None:
    b = bench()
    run(b, TEN)
    assert b.find_prefix([*TEN, 10, 11]).cached == 10
    b.allocate([*TEN, 10, 11])
    assert b.log == []
    assert b.kv_cache.usage()[:3] == (12, 0, 0)


def test_a_text_that_differs_inside_a_block_copies_the_common_part() -> None:
    b = bench()
    run(b, TEN)
    other = [0, 1, 2, 3, 4, 5, 90, 91]
    hit = b.find_prefix(other)
    assert (hit.cached, hit.why_missed) == (6, "the text differs from token 7 on")
    b.allocate(other)
    assert [(type(op), op.tokens) for op in b.log if isinstance(op, Copy)] == [(Copy, 2)]
    assert b.find_prefix(TEN).cached == 9


def test_running_sequences_share_full_blocks_and_count_them_once() -> None:
    b = bench()
    first = b.allocate(TEN)
    assert first is not None
    assert b.compute(first, 8)
    assert b.allocate(TEN) is not None
    usage = b.kv_cache.usage()
    assert (usage.live, usage.shared) == (3 * 4, 2 * 4)


def test_only_computed_tokens_are_found() -> None:
    b = bench()
    first = b.allocate(TEN)
    assert first is not None
    assert b.find_prefix(TEN).cached == 0
    assert b.compute(first, 6)
    assert b.find_prefix(TEN).cached == 6


def test_rejected_drafts_are_never_found() -> None:
    b = bench()
    seq = b.allocate([1, 2])
    assert seq is not None
    assert b.compute(seq, drafts=[3, 4, 5, 6], accept=1)
    assert b.find_prefix([1, 2, 3, 4, 5, 6]).cached == 3


def test_eviction_takes_the_longest_unused_text_from_its_end() -> None:
    b = bench(blocks=6)
    run(b, TEN)
    run(b, [50, 51, 52, 53, 54])
    assert b.kv_cache.usage().free == 4
    seq = b.allocate(list(range(100, 112)))
    assert seq is not None
    assert b.compute(seq)
    assert b.kv_cache.usage().evictions == 2
    assert b.find_prefix(TEN).cached == 4
    assert b.find_prefix(TEN).why_missed == "evicted to make room"
    assert b.find_prefix([50, 51, 52, 53, 54, 55]).cached == 5


def test_what_a_running_sequence_holds_is_not_evicted() -> None:
    b = bench(blocks=4)
    seq = b.allocate(TEN)
    assert seq is not None
    assert b.compute(seq)
    other = b.allocate([20, 21])
    assert other is not None
    assert b.allocate([30]) is None
    assert b.kv_cache.extend(other, 5) is None
    assert b.kv_cache.usage().live == 16


def test_the_last_block_is_reused_when_there_is_no_other() -> None:
    b = bench(blocks=3)
    run(b, list(range(12)))
    assert b.allocate([0, 1, 2, 3, 4, 5, 6, 7, 8, 99]) is not None
    assert b.log == []
    hit = b.find_prefix(list(range(12)))
    assert (hit.cached, hit.why_missed) == (9, "evicted to make room")


def test_prefixes_are_not_shared_across_salts() -> None:
    b = bench()
    run(b, TEN, "mine")
    assert b.find_prefix(TEN, "mine").cached == 9
    assert b.find_prefix(TEN, "yours")[:2] == (0, "")


def test_the_same_text_lives_once_under_each_salt() -> None:
    b = bench()
    run(b, TEN, "mine")
    run(b, TEN, "yours")
    assert [b.find_prefix(TEN, salt).cached for salt in ("mine", "yours", "")] == [9, 9, 0]


def test_what_is_about_to_be_copied_is_not_evicted_for_the_copy() -> None:
    b = bench(blocks=3)
    run(b, [0, 1, 2, 3, 4, 5])
    run(b, [50, 51])
    assert b.allocate([0, 1, 2, 3, 4, 9]) is not None
    assert [type(op) for op in b.log] == [Copy]
    b.flush()
    assert b.find_prefix([0, 1, 2, 3, 4, 5, 6]).cached == 6


def test_a_fork_evicts_when_nothing_is_free() -> None:
    b = bench(blocks=2)
    run(b, [50])
    seq = b.allocate([1, 2])
    assert seq is not None
    assert b.compute(seq)
    assert b.fork(seq) is not None
    b.flush()
    assert b.kv_cache.usage().evictions == 1


def test_a_prefix_released_without_keep_is_dropped() -> None:
    b = bench()
    run(b, TEN[:8])
    run(b, [*TEN, 10, 11, 12], keep=False)
    assert b.find_prefix([*TEN, 10, 11, 12]).cached == 8


def test_two_that_compute_the_same_text_leave_one_copy() -> None:
    b = bench()
    first, second = b.allocate(TEN[:8]), b.allocate(TEN[:8])
    assert first is not None
    assert second is not None
    assert b.compute(first)
    assert b.compute(second)
    assert b.kv_cache.usage().live == 6 * 4 - 8
    b.release(first)
    b.release(second)
    assert b.kv_cache.usage().cached == 2 * 4
    assert b.find_prefix(TEN).cached == 8


def test_a_fork_copies_only_the_partly_filled_block() -> None:
    b = bench()
    seq = b.allocate(TEN)
    assert seq is not None
    assert b.compute(seq)
    child = b.fork(seq)
    assert child is not None
    assert [op.tokens for op in b.log if isinstance(op, Copy)] == [2]
    assert b.kv_cache.usage().shared == 8
    b.running[child].known.append(77)
    assert b.compute(child)
    assert b.find_prefix([*TEN, 77, 78]).cached == 11


def test_a_collision_of_digests_is_a_miss_and_never_another_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_tree, "_digest", lambda parent, tokens: b"same")
    b = bench(blocks=16)
    run(b, TEN)
    assert b.find_prefix(TEN).cached < 9
    run(b, list(range(50, 62)))
    assert b.find_prefix(list(range(50, 62))).cached == 0
    run(b, TEN)
    b.flush()


def test_no_slot_is_no_room_and_changes_nothing() -> None:
    b = bench(slots=1)
    seq = b.allocate([1])
    assert seq is not None
    assert b.allocate([2]) is None
    assert b.fork(seq) is None
    b.release(seq)
    assert b.allocate([2]) is not None


def test_a_stale_hit_is_refused() -> None:
    b = bench()
    hit = b.find_prefix(TEN)
    b.allocate(TEN)
    with pytest.raises(AssertionError, match="older than the last change"):
        b.kv_cache.allocate(99, TEN, hit, "")


def test_never_fits_is_about_the_whole_pool() -> None:
    kv_cache = bench(blocks=2).kv_cache
    assert not kv_cache.never_fits(8)
    assert kv_cache.never_fits(9)


def test_check_finds_a_lost_block() -> None:
    b = bench()
    run(b, TEN)
    assert isinstance(b.kv_cache, PagedKVCacheManager)
    b.kv_cache._free.pop()
    with pytest.raises(AssertionError, match="a block is lost"):
        check(b.kv_cache)


# ---------------------------------------------------------------------------- blocks in host memory


def tiered(blocks: int = 4, host_blocks: int = 8, slots: int = 4) -> Bench:
    can = capabilities(
        kv_tokens=blocks * 4, block_tokens=4, max_slots=slots, host_blocks=host_blocks
    )
    return Bench(PagedKVCacheManager(4, blocks, slots, "model", host_blocks), can)


def test_full_blocks_are_saved_behind_the_steps_and_loaded_after_their_eviction() -> None:
    b = tiered()
    run(b, TEN)
    b.flush()
    assert [op for op in b.log if isinstance(op, SaveBlock)] == [SaveBlock(0, 0), SaveBlock(1, 1)]
    assert not b.kv_cache.behind
    run(b, list(range(50, 64)))
    assert b.kv_cache.usage().swapped == 8
    hit = b.find_prefix(TEN)
    assert (hit.cached, hit.swapped) == (8, 8)
    b.allocate(TEN)
    assert [op.host_block for op in b.log if isinstance(op, LoadBlock)] == [0, 1]
    b.flush()
    assert b.kv_cache.usage().swapped == 8
    assert b.kv_cache.usage().evictions == 2  # the parts of blocks


def test_what_was_not_saved_yet_is_saved_when_it_is_evicted() -> None:
    b = tiered()
    seq = b.allocate(TEN)
    assert seq is not None
    assert b.compute(seq)
    b.release(seq)
    assert b.kv_cache.behind
    other = b.allocate(list(range(50, 64)))
    assert other is not None
    assert b.compute(other)
    assert sum(isinstance(op, SaveBlock) for op in b.log) >= 2
    assert b.find_prefix(TEN).cached == 8


def test_part_of_a_block_in_host_memory_is_a_hit() -> None:
    b = tiered()
    run(b, TEN)
    run(b, list(range(50, 64)))
    hit = b.find_prefix([0, 1, 2, 3, 4, 5, 90, 91])
    assert hit.cached == 6
    b.allocate([0, 1, 2, 3, 4, 5, 90, 91])
    b.flush()
    assert b.find_prefix(TEN).cached == 8


def test_host_memory_evicts_the_longest_unused_text_from_its_end() -> None:
    b = tiered(blocks=4, host_blocks=5)
    first, second, third = TEN[:9], list(range(50, 59)), list(range(70, 79))
    for text in (first, second, first, third):
        run(b, text)
        b.flush()
    assert b.find_prefix(first).cached == 8
    assert b.find_prefix(second).cached == 4
    assert b.find_prefix(second).why_missed == "evicted to make room"


def test_a_text_released_without_keep_leaves_host_memory_too() -> None:
    b = tiered()
    seq = b.allocate(TEN)
    assert seq is not None
    assert b.compute(seq)
    b.flush()
    b.release(seq, keep=False)
    b.flush()
    assert b.find_prefix(TEN).cached == 0
    assert b.kv_cache.usage().swapped == 0


def test_a_block_computed_again_is_not_saved_again() -> None:
    b = tiered(blocks=8, host_blocks=20)
    run(b, TEN)
    b.flush()
    for text in (list(range(50, 64)), list(range(70, 84)), list(range(90, 104))):
        run(b, text)
        b.flush()
    saved = sum(isinstance(op, SaveBlock) for op in b.log)
    run(b, TEN)
    b.flush()
    assert sum(isinstance(op, SaveBlock) for op in b.log) == saved
