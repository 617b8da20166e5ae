"""The paged KV cache of a model with windows: what is given back, what is found again, and what goes first."""

import random

import pytest

from localchat.backend_api.interface import Copy
from localchat.core.kv_cache.paged import PagedKVCacheManager
from localchat.core.kv_cache.paged_windows import WindowedKVCacheManager
from localchat_cuda.plan import window_plan
from tests.support.cuda_machines import CONFIG
from tests.support.kv_cache_bench import Bench, capabilities

BLOCK, WINDOW = 4, 8


def bench(
    window_blocks: int = 30, *, blocks: int = 60, slots: int = 4, window: int = WINDOW
) -> Bench:
    can = capabilities(
        kv_tokens=blocks * BLOCK, block_tokens=BLOCK, max_slots=slots, depth=2, window_tokens=window,
        window_blocks=window_blocks,
    )  # fmt: skip
    pages = PagedKVCacheManager(BLOCK, blocks, slots, "model")
    return Bench(WindowedKVCacheManager(pages, BLOCK, window, window_blocks), can)


def text(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


def run(b: Bench, tokens: list[int], *, step: int = 1 << 30, keep: bool = True) -> None:
    """One whole sequence, computed and released."""
    seq = b.allocate(tokens)
    assert seq is not None
    while b.running[seq].computed < len(tokens):
        assert b.compute(seq, step)
    b.release(seq, keep=keep)


def room(b: Bench) -> int:
    assert isinstance(b.kv_cache, WindowedKVCacheManager)
    return b.kv_cache._blocks.room


def test_a_long_text_holds_its_window_and_no_more() -> None:
    b = bench(10)
    seq = b.allocate(text(200))
    assert seq is not None
    while b.running[seq].computed < 200:
        assert b.compute(seq, 5)
        # Of 7 keys that the next token sees, one block before them, and room for it.
        assert 10 - room(b) <= 5


def test_the_window_before_the_end_of_a_text_is_enough_for_a_hit() -> None:
    b = bench(10)
    run(b, text(100), step=5)
    assert b.find_prefix(text(120)).cached == 100
    assert b.find_prefix(text(100)).cached == 99
    run(b, text(120), step=5)


def test_a_text_that_parts_where_no_window_is_left_begins_again() -> None:
    b = bench(8)
    run(b, text(100), step=5)
    hit = b.find_prefix([*text(40), 990, 991])
    assert (hit.cached, hit.why_missed) == (0, "its sliding window was evicted to make room")
    assert b.allocate([*text(40), 990, 991]) is not None


def test_blocks_from_the_middle_stay_findable_as_long_as_there_is_room() -> None:
    b = bench(40)
    run(b, text(100), step=5)
    assert b.find_prefix([*text(42), 990]).cached == 42
    run(b, [*text(42), 990, 991])


def test_the_end_of_a_prompt_outlives_the_middle_of_another_text() -> None:
    b = bench(14)
    seq = b.allocate(text(30))
    assert seq is not None
    assert b.compute(seq)
    for token in range(100, 140):
        b.running[seq].known.append(token)
        assert b.compute(seq)
    b.release(seq)
    run(b, text(60, 500), step=4)
    # Its answer is left out of the next prompt.
    assert b.find_prefix([*text(30), 990]).cached == 30


def test_a_released_text_is_continued_in_place() -> None:
    b = bench(8)
    run(b, text(30), step=5)
    seq = b.allocate(text(40))
    assert seq is not None
    assert b.log == []
    assert b.compute(seq, 5)


def test_a_text_that_parts_inside_a_block_gets_copies_of_both_kinds() -> None:
    b = bench()
    run(b, text(30))
    b.allocate([*text(26), 990])
    assert [(op.tokens, op.window) for op in b.log if isinstance(op, Copy)] == [
        (2, False),
        (2, True),
    ]
    b.flush()


def test_a_fork_shares_the_window_and_goes_its_own_way() -> None:
    b = bench(12)
    seq = b.allocate(text(50))
    assert seq is not None
    while b.running[seq].computed < 50:
        assert b.compute(seq, 5)
    held = 12 - room(b)
    child = b.fork(seq)
    assert child is not None
    assert 12 - room(b) == held + 1
    for one, token in ((seq, 70), (child, 80)):
        b.running[one].known += text(20, token)
        assert b.compute(one, 5)
        assert b.compute(one, 5)


def test_nothing_of_a_spoilt_text_is_found() -> None:
    b = bench()
    run(b, text(30), keep=False)
    assert b.find_prefix(text(40)).cached == 0
    assert room(b) == 30


def test_the_same_text_computed_twice_is_found_by_the_copy_that_is_held() -> None:
    b = bench(12)
    first, second = b.allocate(text(11)), b.allocate(text(11))
    assert first is not None and second is not None
    assert b.compute(first)
    b.release(first)
    assert b.compute(second)
    run(b, text(36, 500))
    assert b.find_prefix(text(20)).cached == 11
    b.release(second)
    assert b.find_prefix(text(20)).cached == 11
    run(b, text(20))


def test_a_spoilt_copy_is_not_found_by_the_text_of_a_sound_one() -> None:
    b = bench(12)
    first, second = b.allocate(text(12)), b.allocate(text(12))
    assert first is not None and second is not None
    assert b.compute(first)
    assert b.compute(second)
    b.release(first, keep=False)
    assert b.find_prefix(text(20)).cached == 0


def test_two_that_go_on_from_the_same_block_write_to_blocks_of_their_own() -> None:
    b = bench(12)
    first = b.allocate(text(10))
    assert first is not None
    assert b.compute(first)
    second = b.allocate([*text(10), 70])
    assert second is not None
    b.running[first].known.append(80)
    assert b.running[second].computed == 10
    for _ in range(2):
        for seq in (first, second):
            assert b.compute(seq)
            b.running[seq].known.append(seq)


def test_a_block_is_no_longer_found_once_it_is_taken_for_other_tokens() -> None:
    b = bench(8)
    run(b, text(20))
    seq = b.allocate(text(30, 500))
    assert seq is not None
    assert b.find_prefix(text(21)).cached == 20
    assert b.kv_cache.extend(seq, 29) is not None
    assert b.find_prefix(text(21)).cached == 0


def test_without_room_for_a_window_nothing_changes() -> None:
    b = bench(4)
    seq = b.allocate(text(20))
    assert seq is not None
    assert b.compute(seq, 12)
    assert not b.compute(seq, 8)
    assert b.compute(seq, 4)
    assert b.allocate(text(5, 70)) is not None
    assert b.allocate(text(5, 80)) is None


@pytest.mark.parametrize("seed", range(4))
def test_what_the_plan_gives_its_rows_is_enough_whatever_they_do(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random steps of several rows, two in flight: no window block is ever missing, and none is lost."""
    monkeypatch.setattr(window_plan, "PAGE_TOKENS", BLOCK)
    monkeypatch.setattr(window_plan, "window_of", lambda config: WINDOW)
    draw, slots, most = random.Random(seed), 4, 24
    pages = slots * window_plan.sequence_pages(CONFIG) + window_plan.step_pages(most)
    b = bench(pages, blocks=400, slots=slots)
    for _ in range(120):
        seqs = list(b.running)
        what = draw.random()
        if len(seqs) < slots and what < 0.2:
            known = [draw.randint(0, 1) for _ in range(draw.randint(1, 70))]
            assert b.allocate(known) is not None
            continue
        if seqs and what < 0.25:
            b.release(draw.choice(seqs), keep=draw.random() < 0.8)
            continue
        # Rows of two steps have their blocks before either of them is committed.
        rows, left = [], 2 * most
        for seq in draw.sample(seqs, len(seqs)):
            it = b.running[seq]
            it.known += [draw.randint(0, 1) for _ in range(draw.randint(1, 9))]
            width = min(draw.randint(1, most), len(it.known) - it.computed, left)
            if width > 0:
                update = b.kv_cache.extend(seq, it.computed + width)
                assert update is not None, "a row found no window block"
                it.new_blocks += update.new_blocks
                it.new_window_blocks += update.new_window_blocks
                left -= width
                rows.append((seq, width))
        for seq, width in rows:
            assert b.compute(seq, width)
