"""Memory operations: whatever way a prefix came into a slot, the text goes on as if it had been computed."""

import numpy as np
import pytest

from localchat.backend_api.interface import (
    Alias,
    Copy,
    Discard,
    Drop,
    Enter,
    LogitsPosition,
    Restore,
    Save,
    StepRow,
    Truncate,
)
from tests.support.llamacpp_driver import GREEDY, Start, asking_to_abort
from tests.support.llamacpp_models import VOCAB, WINDOW

TEXT = tuple(int(t) for t in np.random.default_rng(6).integers(0, VOCAB - 3, 300))
SHARED = TEXT[:90]
ONE = SHARED + TEXT[100:130]
OTHER = SHARED + TEXT[200:210]


def _fresh(start: Start, tokens: tuple[int, ...], **options: object) -> list[int]:
    driver = start(**options)
    return [driver.prefill(tokens).samples[0].token, *driver.go_on(len(tokens), 6)]


def test_an_aliased_prefix_goes_on_like_a_computed_one_and_leaves_its_source_alone(
    start: Start,
) -> None:
    driver = start()
    first = driver.prefill(ONE)
    begun = driver.prefill(OTHER, seq=1, slot=1, start=90, memory=[Alias(0, 1, 90)])
    assert [begun.samples[0].token, *driver.go_on(100, 6, seq=1, slot=1)] == _fresh(start, OTHER)
    assert [first.samples[0].token, *driver.go_on(120, 6)] == _fresh(start, ONE)


def test_an_alias_empties_its_target_first(start: Start) -> None:
    driver = start()
    driver.prefill(TEXT[140:200], seq=1, slot=1)
    driver.prefill(ONE)
    begun = driver.prefill(OTHER, seq=2, slot=1, start=90, memory=[Alias(0, 1, 90)])
    assert [begun.samples[0].token, *driver.go_on(100, 6, seq=2, slot=1)] == _fresh(start, OTHER)


def test_a_truncated_slot_takes_another_ending(start: Start) -> None:
    driver = start()
    driver.prefill(ONE)
    begun = driver.prefill(OTHER, seq=1, start=90, memory=[Truncate(0, 90)])
    assert [begun.samples[0].token, *driver.go_on(100, 6, seq=1)] == _fresh(start, OTHER)


@pytest.mark.parametrize(("kv_type", "flash"), [("f16", False), ("q8_0", True)])
def test_a_parked_slot_comes_back_elsewhere_and_shorter(
    start: Start, kv_type: str, flash: bool
) -> None:
    driver = start(kv_type=kv_type, flash=flash)
    driver.prefill(ONE)
    before = driver.runner.memory().other_bytes
    driver.step(memory=[Save(0, 77), Drop(0)])
    assert driver.runner.memory().other_bytes > before
    # Other cells of the cache are taken in between.
    driver.prefill(TEXT[140:200], seq=5, slot=0)
    begun = driver.prefill(OTHER, seq=1, slot=3, start=90, memory=[Restore(77, 3, 90)])
    expected = _fresh(start, OTHER, kv_type=kv_type, flash=flash)
    assert [begun.samples[0].token, *driver.go_on(100, 6, seq=1, slot=3)] == expected
    # The key stays saved until it is discarded.
    whole = driver.prefill((*ONE, 3), seq=2, slot=2, start=120, memory=[Restore(77, 2, 120)])
    expected = _fresh(start, (*ONE, 3), kv_type=kv_type, flash=flash)
    assert [whole.samples[0].token, *driver.go_on(121, 6, seq=2, slot=2)] == expected
    driver.step(memory=[Discard(77)])
    assert driver.runner.memory().other_bytes == before


def test_a_restore_without_room_is_a_result_and_later_operations_are_done(start: Start) -> None:
    driver = start(context=240)
    driver.prefill(TEXT[:150])
    driver.step(memory=[Save(0, 1)])
    result = driver.step(
        StepRow(1, 1, 150, (5,)),
        positions=[LogitsPosition(0, 0, 1)],
        enter=[Enter(1, 1, (*TEXT[:150], 5), 151, GREEDY)],
        memory=[Restore(1, 1, 150), Drop(0)],
    )
    assert (result.status, result.computed, result.lost_slots) == ("out_of_memory", (0,), (1,))
    result = driver.step(
        StepRow(1, 1, 150, (5,)), positions=[LogitsPosition(0, 0, 1)], memory=[Restore(1, 1, 150)]
    )
    assert result.samples[0].token == _fresh(start, (*TEXT[:150], 5))[0]


def test_a_slot_that_found_no_room_is_lost_with_what_shares_from_it_until_it_is_dropped(
    start: Start,
) -> None:
    driver = start(context=240)
    driver.prefill(TEXT[:150])
    driver.step(memory=[Save(0, 1)])
    without_room = driver.step(memory=[Restore(1, 1, 150), Alias(1, 2, 90), Truncate(2, 40)])
    assert (without_room.status, without_room.lost_slots) == ("out_of_memory", (1, 2))
    dropped = driver.step(memory=[Drop(0), Drop(1), Drop(2), Restore(1, 1, 150), Alias(1, 2, 90)])
    assert (dropped.status, dropped.lost_slots) == ("ok", ())


@pytest.mark.parametrize(
    "operation",
    [Drop(9), Truncate(-1, 0), Alias(0, 400, 0), Alias(0, 1, 1), Truncate(0, 1), Save(17, 0)],
)
def test_slots_that_do_not_exist_never_reach_native_code(start: Start, operation: Drop) -> None:
    with pytest.raises(AssertionError):
        start().step(memory=[operation])


def test_a_cache_without_blocks_refuses_to_copy_them(start: Start) -> None:
    with pytest.raises(ValueError, match="no blocks"):
        start().step(memory=[Copy(0, 1, 1)])


def test_a_row_that_leaves_a_gap_is_a_broken_invariant(start: Start) -> None:
    driver = start()
    driver.prefill(ONE)
    with pytest.raises(AssertionError, match="holds 120 tokens"):
        driver.step(StepRow(0, 0, 90, TEXT[:5]))


# ---------------------------------------------------------------- sliding windows


def test_a_full_sliding_window_cache_rewinds_anywhere_while_it_says_so(start: Start) -> None:
    driver = start("gemma3")
    assert driver.prefill(TEXT).earliest == (0,)
    begun = driver.prefill(OTHER, seq=1, start=90, memory=[Truncate(0, 90)])
    expected = _fresh(start, OTHER, name="gemma3")
    assert [begun.samples[0].token, *driver.go_on(100, 6, seq=1)] == expected


def test_a_saved_state_of_a_sliding_window_model_has_the_window_alone(start: Start) -> None:
    driver = start("gemma3")
    can = driver.runner.capabilities
    assert (can.rewind, can.rewind_tokens) == ("last_n", WINDOW)
    driver.prefill(TEXT)
    whole = start("gemma3")
    expected = [whole.prefill(TEXT).samples[0].token, *whole.go_on(len(TEXT), 6)]
    driver.step(memory=[Save(0, 1), Drop(0)])
    entered = Enter(1, 1, tuple(TEXT), len(TEXT), GREEDY)
    driver.step(memory=[Restore(1, 1, len(TEXT))], enter=[entered])
    ahead = StepRow(1, 1, len(TEXT), (expected[0],))
    result = driver.step(ahead, positions=[LogitsPosition(0, 0, 1)])
    assert result.earliest[0] >= len(TEXT) - WINDOW
    assert result.samples[0].token == expected[1]


def test_a_window_only_cache_says_how_far_back_it_reaches(start: Start) -> None:
    driver = start("gemma3", window_only=True)
    can = driver.runner.capabilities
    assert (can.rewind, can.rewind_tokens) == ("last_n", WINDOW)
    assert "32 tokens" in can.limits[0]
    result = driver.prefill(TEXT, chunk=16)
    earliest = result.earliest[0]
    assert 0 < earliest <= len(TEXT) - WINDOW
    # As far back as the contract allows: still as if computed.
    keep = earliest + WINDOW
    assert keep < len(TEXT)
    ending = TEXT[:keep] + OTHER[-10:]
    begun = driver.prefill(ending, seq=1, start=keep, memory=[Truncate(0, keep)])
    expected = _fresh(start, ending, name="gemma3", window_only=True)
    assert [begun.samples[0].token, *driver.go_on(len(ending), 6, seq=1)] == expected


def test_a_long_text_is_shared_in_a_window_only_cache_without_filling_it(start: Start) -> None:
    driver = start("gemma3", window_only=True)
    first = driver.prefill(TEXT)
    shared = [Alias(0, slot, 290) for slot in (1, 2, 3)]
    texts = [TEXT[:290] + TEXT[slot : slot + 40] for slot in (1, 2, 3)]
    begun = [
        driver.prefill(text, seq=slot, slot=slot, start=290, memory=shared if slot == 1 else ())
        for slot, text in enumerate(texts, 1)
    ]
    for slot, text in enumerate(texts, 1):
        goes_on = driver.go_on(len(text), 6, seq=slot, slot=slot)
        expected = _fresh(start, text, name="gemma3", window_only=True)
        assert [begun[slot - 1].samples[0].token, *goes_on] == expected
    expected = _fresh(start, TEXT, name="gemma3", window_only=True)
    assert [first.samples[0].token, *driver.go_on(len(TEXT), 6)] == expected


def test_a_window_only_cache_takes_less_memory(start: Start) -> None:
    full = start("gemma3", context=4096).runner.memory().kv_bytes
    assert start("gemma3", context=4096, window_only=True).runner.memory().kv_bytes < full / 2


# ---------------------------------------------------------------- recurrent models


def test_a_recurrent_model_comes_back_from_saved_states(start: Start) -> None:
    driver = start("mamba")
    can = driver.runner.capabilities
    assert can.rewind == "checkpoint"
    assert can.max_slots - can.max_rows == 2  # they hold states from before drafts
    assert can.state_bytes > 0
    assert "cannot be cut back" in can.limits[0]
    driver.prefill(SHARED)
    driver.step(memory=[Save(0, 1)])
    driver.prefill(ONE, seq=1, start=90)
    begun = driver.prefill(OTHER, seq=2, slot=2, start=90, memory=[Restore(1, 2, 90)])
    expected = _fresh(start, OTHER, name="mamba")
    assert [begun.samples[0].token, *driver.go_on(100, 6, seq=2, slot=2)] == expected


def test_a_recurrent_model_refuses_to_be_cut(start: Start) -> None:
    driver = start("mamba")
    driver.prefill(SHARED)
    with pytest.raises(AssertionError, match="cannot rewind"):
        driver.step(memory=[Truncate(0, 50)])
    with pytest.raises(AssertionError, match="whole states"):
        driver.step(memory=[Alias(0, 1, 50)])


def test_a_recurrent_state_is_shared_whole(start: Start) -> None:
    driver = start("mamba")
    driver.prefill(SHARED)
    begun = driver.prefill(OTHER, seq=1, slot=1, start=90, memory=[Alias(0, 1, 90)])
    assert [begun.samples[0].token, *driver.go_on(100, 6, seq=1, slot=1)] == _fresh(
        start, OTHER, name="mamba"
    )


def test_an_abort_of_a_recurrent_model_waits_for_the_step(start: Start) -> None:
    """Its half-changed state could not be taken back."""
    driver = start("mamba", step=256)
    with asking_to_abort(driver):
        assert driver.prefill(TEXT[:200]).status == "ok"
