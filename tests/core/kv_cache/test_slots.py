"""A unified cache of slots: in place, shared, swapped, restored; what each kind of model
allows."""

import pytest

from localchat.backend_api.interface import Alias, Discard, Drop, MemoryOp, Restore, Save, Truncate
from localchat.core.kv_cache.manager import CacheUpdate, ValidTokens
from localchat.core.kv_cache.slots import SlotKVCacheManager
from tests.support.cache_integrity import check
from tests.support.kv_cache_bench import Bench
from tests.support.slot_benches import TEN, bench, start


def run(b: Bench, tokens: list[int], salt: str = "", *, keep: bool = True) -> None:
    """One whole sequence, computed and released."""
    seq = start(b, tokens, salt)
    b.checkpoint(seq)
    b.release(seq, keep=keep)


def since(b: Bench, before: int) -> list[MemoryOp]:
    return b.log[before:]


# ---------------------------------------------------------------------------- idle texts


def test_the_next_turn_of_a_conversation_continues_in_its_slot() -> None:
    b = bench()
    run(b, TEN)
    assert b.kv_cache.usage().cached == 10
    start(b, [*TEN, 10, 11])
    assert [op for op in b.log if not isinstance(op, Drop)] == []
    assert b.kv_cache.usage()[:3] == (12, 0, 0)


def test_an_edited_turn_saves_the_old_branch_and_is_truncated_to_the_common_prefix() -> None:
    b = bench()
    run(b, TEN)
    hit = b.find_prefix([0, 1, 2, 3, 90])
    assert (hit.cached, hit.why_missed) == (4, "")
    hit = b.find_prefix([0, 1, 2, 3, 90, 91])
    assert (hit.cached, hit.why_missed) == (4, "the text differs from token 5 on")
    before = len(b.log)
    b.allocate([0, 1, 2, 3, 90])
    assert since(b, before) == [Save(0, 1), Truncate(0, 4)]
    assert b.find_prefix(TEN).cached == 9


def test_an_idle_conversation_is_swapped_for_another_and_restored_on_return() -> None:
    b = bench()
    run(b, TEN)
    before = len(b.log)
    seq = start(b, [50, 51])
    assert since(b, before)[:2] == [Save(0, 1), Drop(0)]
    assert b.kv_cache.usage().swapped == 10
    b.release(seq)
    before = len(b.log)
    assert b.find_prefix([*TEN, 10]).cached == 10
    b.allocate([*TEN, 10])
    assert since(b, before) == [Save(0, 2), Drop(0), Restore(1, 0, 10)]


def test_a_sequence_that_ends_while_others_run_is_swapped_at_once() -> None:
    b = bench()
    first = start(b, TEN)
    start(b, [50, 51])
    b.release(first)
    assert b.log[-2:] == [Save(0, 1), Drop(0)]
    assert b.kv_cache.usage().cached == 0


def test_a_longer_state_replaces_its_own_shorter_one() -> None:
    b = bench()
    for tokens in (TEN, [50], [*TEN, 10, 11], [50]):
        run(b, tokens)
    assert Discard(1) in b.log
    assert b.kv_cache.usage().swapped == 12 + 1
    assert b.find_prefix([*TEN, 10, 11, 12]).cached == 12


def test_short_prefixes_are_dropped_instead_of_swapped() -> None:
    b = bench(worth=11)
    run(b, TEN)
    run(b, [50])
    assert b.kv_cache.usage().swapped == 0


# ---------------------------------------------------------------------------- host cache


def test_the_host_cache_is_bounded_and_the_longest_unused_goes_first() -> None:
    b = bench(ram=250, state_bytes=20)
    for tokens in (TEN, [20 + t for t in TEN], [40 + t for t in TEN], [60]):
        run(b, tokens)
    assert b.kv_cache.usage().swapped == 20
    assert b.kv_cache.usage().evictions == 1
    assert b.find_prefix(TEN).why_missed == "evicted to make room"
    assert b.find_prefix([20 + t for t in TEN]).cached == 9


def test_a_state_too_large_for_the_host_cache_leaves_its_shorter_one_there() -> None:
    b = bench(ram=110)
    for tokens in (TEN, [50], [*TEN, 10, 11], [50]):
        run(b, tokens)
    assert b.find_prefix([*TEN, 10, 11, 12]).cached == 10


def test_a_disposable_branch_evicts_no_other_conversation() -> None:
    b = bench(ram=220)
    run(b, TEN)
    run(b, [50 + t for t in TEN])
    run(b, [*range(50, 56), 90])
    assert b.kv_cache.usage().swapped == 20
    run(b, [*range(50, 56), 91])
    assert b.find_prefix(TEN).cached == 9
    run(b, [70 + t for t in TEN])
    assert b.find_prefix(TEN).cached == 9
    assert b.find_prefix([50 + t for t in TEN]).cached == 6


def test_a_disposable_branch_is_lost_rather_than_evicting() -> None:
    b = bench(ram=120)
    run(b, TEN)
    run(b, [50 + t for t in TEN])
    run(b, [*range(50, 56), 90])
    assert b.find_prefix(TEN).cached == 9
    assert b.find_prefix([50 + t for t in TEN]).why_missed == "evicted to make room"


def test_another_conversation_that_begins_alike_is_no_disposable_branch() -> None:
    b = bench(ram=120)
    run(b, TEN)
    run(b, [50 + t for t in TEN])
    run(b, [50, 51, 52, 90])
    assert b.find_prefix([50 + t for t in TEN]).cached == 9
    assert b.find_prefix(TEN).why_missed == "evicted to make room"


def test_a_second_choice_is_disposable_and_the_first_is_not() -> None:
    b = bench(ram=250)
    first = start(b, TEN)
    second = b.fork(first)
    assert second is not None
    for seq in (first, second):
        b.running[seq].known.append(20 + seq)
        assert b.compute(seq)
    b.release(second)
    b.release(first)
    run(b, [50 + t for t in TEN])
    run(b, [70])
    assert b.find_prefix([*TEN, 21, 1]).cached == 11
    assert b.find_prefix([*TEN, 22, 1]).cached == 10


def test_a_restored_text_counts_as_used_now() -> None:
    b = bench(ram=200, worth=2)
    for tokens in (TEN, [20 + t for t in TEN], [90]):
        run(b, tokens)
    run(b, TEN, keep=False)
    run(b, [40 + t for t in TEN])
    run(b, [91])
    assert b.find_prefix([*TEN, 10]).cached == 10
    assert b.find_prefix([20 + t for t in TEN]).cached == 0


def test_saving_a_longer_state_needs_only_the_difference() -> None:
    b = bench(ram=220, worth=2)
    for tokens in ([20 + t for t in TEN], TEN, [*TEN, 10, 11]):
        run(b, tokens)
        run(b, [90])
    assert b.kv_cache.usage().swapped == 22
    assert b.find_prefix([*TEN, 10, 11, 12]).cached == 12


def test_without_a_host_cache_the_text_is_dropped_and_the_miss_says_so() -> None:
    b = bench(ram=0)
    run(b, TEN)
    run(b, [50])
    assert not [op for op in b.log if isinstance(op, Save)]
    assert "swapping to RAM is off" in b.find_prefix(TEN).why_missed


def test_a_text_larger_than_the_host_cache_says_so() -> None:
    b = bench(ram=90)
    run(b, TEN)
    run(b, [50])
    assert "larger than the RAM for swapping" in b.find_prefix(TEN).why_missed


def test_a_state_about_to_be_restored_is_not_evicted_for_one_being_saved() -> None:
    b = bench(ram=150)
    run(b, TEN)
    run(b, [50 + t for t in TEN])
    assert b.find_prefix([*TEN, 10]).cached == 10
    start(b, [*TEN, 10])
    assert b.kv_cache.usage().evictions == 1


def test_without_room_to_restore_the_prompt_is_computed_at_once() -> None:
    b = bench(kv_tokens=21)
    run(b, TEN)
    start(b, [50 + t for t in TEN[:9]])
    start(b, [70])
    assert (b.find_prefix([*TEN, 10]).cached, b.kv_cache.usage().free) == (10, 11)
    start(b, [80])
    assert b.find_prefix([*TEN, 10]).cached == 0
    assert "no room now to restore it" in b.find_prefix([*TEN, 10]).why_missed


def test_a_restore_needs_room_for_all_that_was_saved() -> None:
    b = bench(kv_tokens=21)
    run(b, TEN)
    start(b, [50 + t for t in range(12)])
    hit = b.find_prefix([*TEN[:4], 90, 91])
    assert hit.cached == 0
    assert "no room now to restore it" in hit.why_missed


def test_a_short_prefix_of_a_long_swapped_text_is_not_restored() -> None:
    b = bench(kv_tokens=200, context_tokens=200)
    run(b, list(range(101)))
    run(b, [500])
    assert b.find_prefix([0, 1, 900]).cached == 0
    assert b.find_prefix([0, 1, 2, 900]).cached == 3


# ---------------------------------------------------------------------------- sharing


def test_a_running_prefix_is_shared_without_a_copy_and_counted_once() -> None:
    b = bench()
    start(b, TEN)
    start(b, [*TEN, 10, 11])
    assert b.log == [Alias(0, 1, 10)]
    usage = b.kv_cache.usage()
    assert (usage.live, usage.shared) == (12, 10)


def test_a_shared_prefix_outlives_the_sequence_that_computed_it() -> None:
    b = bench()
    first = start(b, TEN)
    start(b, [*TEN, 10])
    b.release(first, keep=False)
    b.flush()
    assert b.kv_cache.usage()[:2] == (11, 0)


def test_a_fork_shares_the_prefix_of_its_parent() -> None:
    b = bench()
    assert b.fork(start(b, TEN)) is not None
    assert b.log == [Alias(0, 1, 10)]


def test_free_room_is_counted_in_cells() -> None:
    b = bench(kv_tokens=16)
    seq = start(b, TEN)
    for _ in range(3):
        child = b.fork(seq) or 0
        assert child
    assert b.kv_cache.usage().free == 3
    assert b.kv_cache.extend(child, 15) is None
    assert b.kv_cache.extend(child, 14) is not None
    assert b.kv_cache.usage().free == 0


# ---------------------------------------------------------------------------- kinds of models


def test_rejected_drafts_are_truncated() -> None:
    b = bench()
    seq = b.allocate([1, 2])
    assert seq is not None
    assert b.compute(seq, drafts=[3, 4, 5], accept=1)
    assert b.log == [Truncate(0, 3)]
    assert b.kv_cache.usage().live == 3


def test_a_recurrent_model_goes_on_only_at_its_checkpoints() -> None:
    b = bench(rewind="checkpoint", state_bytes=100)
    seq = start(b, TEN)
    b.checkpoint(seq)
    b.running[seq].known.extend([10, 11])
    b.compute(seq)
    assert b.find_prefix([*TEN, 10, 11, 12]).cached == 10
    b.checkpoint(seq)
    b.release(seq)
    run(b, [50, 51])
    assert b.find_prefix([*TEN, 10, 11, 12]).cached == 12
    assert b.find_prefix([*TEN, 10, 99]).cached == 10
    assert "cannot rewind" in b.find_prefix([*TEN, 10, 99, 100]).why_missed
    assert b.find_prefix(TEN).cached == 0
    b.allocate([*TEN, 10, 99])
    assert b.log[-1] == Restore(1, 0, 10)
    assert not [op for op in b.log if isinstance(op, Alias | Truncate)]


def test_a_model_that_can_rewind_saves_no_checkpoints() -> None:
    b = bench()
    seq = start(b, TEN)
    b.checkpoint(seq)
    assert b.log == []


# ---------------------------------------------------------------------------- salts and limits


def test_why_missed_never_reveals_another_salt() -> None:
    b = bench(ram=0)
    run(b, TEN, "mine")
    assert b.find_prefix([*TEN, 1], "yours")[:2] == (0, "")
    run(b, [50], "mine")
    assert b.find_prefix([*TEN, 1], "yours")[:2] == (0, "")
    assert b.find_prefix([*TEN, 1], "mine").why_missed


def test_neither_running_nor_swapped_texts_are_found_under_another_salt() -> None:
    b = bench()
    run(b, TEN, "mine")
    start(b, [50 + t for t in TEN], "mine")
    assert b.find_prefix([*TEN, 1], "mine").cached == 10
    assert b.find_prefix([*TEN, 1], "yours")[:2] == (0, "")
    assert b.find_prefix([50 + t for t in TEN], "yours")[:2] == (0, "")


def test_never_fits_is_about_cells_and_context() -> None:
    kv_cache = bench(kv_tokens=30, context_tokens=20).kv_cache
    assert not kv_cache.never_fits(20)
    assert kv_cache.never_fits(21)


def test_an_idle_conversation_is_swapped_when_slots_or_cells_run_out() -> None:
    b = bench(max_slots=1, kv_tokens=12, ram=0)
    run(b, TEN)
    assert start(b, [50 + t for t in TEN]) is not None
    assert b.allocate([1]) is None


def test_a_stale_hit_is_refused() -> None:
    b = bench()
    hit = b.find_prefix(TEN)
    b.allocate(TEN)
    with pytest.raises(AssertionError, match="older than the last change"):
        b.kv_cache.allocate(99, TEN, hit, "")


def test_check_finds_a_miscounted_cell() -> None:
    b = bench()
    start(b, TEN)
    assert isinstance(b.kv_cache, SlotKVCacheManager)
    b.kv_cache._cells.free -= 1
    with pytest.raises(AssertionError, match="cells used"):
        check(b.kv_cache)


def test_a_state_is_held_while_drafts_are_verified() -> None:
    b = bench(rewind="checkpoint", max_slots=3, max_rows=2)
    seq = start(b, TEN)
    held = b.kv_cache.hold_state(seq)
    assert held is not None
    assert held.memory == (Alias(0, 1, 10),)
    b.kv_cache.extend(seq, 14)
    taken = b.kv_cache.commit(seq, [*TEN, 10, 11, 12], ValidTokens(12))
    assert taken.kept == 10
    assert taken.memory == (Drop(0), Alias(1, 0, 10), Drop(1))
    b.kv_cache.hold_state(seq)
    b.kv_cache.extend(seq, 13)
    assert b.kv_cache.commit(seq, [*TEN, 10, 11, 12, 13], ValidTokens(13)) == CacheUpdate(
        (Drop(1),)
    )
    check(b.kv_cache)


def test_no_state_is_held_where_the_rows_need_all_slots() -> None:
    b = bench(rewind="checkpoint", max_slots=2, max_rows=2)
    assert b.kv_cache.hold_state(start(b, TEN)) is None
    assert bench().kv_cache.hold_state(0) == CacheUpdate()
