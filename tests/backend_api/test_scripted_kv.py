"""The storage refuses what a real cache would do wrongly in silence."""

import pytest

from localchat.backend_api.interface import (
    Alias,
    Copy,
    Drop,
    Enter,
    MemoryOp,
    Restore,
    SamplingParams,
    Save,
    StepPlan,
    StepRow,
    Truncate,
)
from tests.support.kv_cache_bench import capabilities
from tests.support.scripted_kv import BlockStorage, SlotStorage, storage_for


def slots(**changes: object) -> SlotStorage:
    """Slot 0 holds 1, 2, 3."""
    storage = storage_for(capabilities(**changes))
    assert isinstance(storage, SlotStorage)
    storage.write(StepRow(0, 0, 0, (1, 2, 3)), (1, 2, 3))
    return storage


def enter(seq: int, slot: int) -> Enter:
    return Enter(seq, slot, (), 0, SamplingParams())


def test_operations_move_the_text_as_they_say() -> None:
    s = slots()
    for op in (Alias(0, 1, 2), Save(0, 7), Drop(0), Restore(7, 2, 2), Truncate(1, 1)):
        s.apply(op)
    assert [s.held(slot) for slot in range(4)] == [[], [1], [1, 2], []]
    assert s.used == 3
    assert s.saved() == {7: 3}


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (Alias(1, 2, 1), "1 of 0 tokens"),
        (Alias(0, 0, 1), "not empty"),
        (Truncate(0, 4), "4 of 3"),
        (Save(1, 7), "slot 1 is empty"),
        (Copy(0, 1, 1), "no blocks"),
    ],
)
def test_an_impossible_operation_is_refused(op: MemoryOp, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        slots().apply(op)


def test_positions_are_dense() -> None:
    for start in (2, 4):
        with pytest.raises(AssertionError, match="gap or overlap"):
            slots().write(StepRow(0, 0, start, (9,)), (9,))


def test_cells_run_out_also_while_a_state_is_restored() -> None:
    s = slots(kv_tokens=5)
    s.apply(Save(0, 7))
    with pytest.raises(AssertionError, match="6 cells of 5"):
        s.apply(Restore(7, 1, 1))


def test_kinds_of_models_refuse_what_they_cannot() -> None:
    with pytest.raises(AssertionError, match="cannot rewind"):
        slots(rewind="checkpoint").apply(Truncate(0, 2))
    window = slots(rewind="last_n", rewind_tokens=2)
    window.write(StepRow(0, 0, 3, (4, 5, 6)), (4, 5, 6))
    window.write(StepRow(0, 0, 6, (7,)), (7,))
    assert window.earliest(0) == 4
    with pytest.raises(AssertionError, match="the window moved on to 4"):
        window.apply(Truncate(0, 5))
    window.apply(Truncate(0, 6))


def test_a_text_entered_must_be_what_the_slot_holds() -> None:
    with pytest.raises(AssertionError, match="another text"):
        slots().begin(StepPlan(0, enter=(Enter(1, 0, (1, 9), 2, SamplingParams()),)))


def blocks() -> BlockStorage:
    """Sequence 1 in slot 0 holds 0 to 5 in blocks 3 and 4."""
    storage = storage_for(capabilities(block_tokens=4))
    assert isinstance(storage, BlockStorage)
    storage.begin(StepPlan(0, enter=(enter(1, 0),)))
    storage.write(StepRow(1, 0, 0, tuple(range(6)), new_blocks=(3, 4)), range(6))
    return storage


def test_a_table_shares_blocks_and_goes_on_in_a_copy() -> None:
    s = blocks()
    s.begin(StepPlan(1, memory=(Copy(4, 5, 1),), enter=(enter(2, 1),)))
    s.write(StepRow(2, 1, 5, (50,), new_blocks=(3, 5)), (50,))
    assert (s.held(0), s.held(1)) == ([*range(6)], [0, 1, 2, 3, 4, 50])


def test_shared_and_missing_blocks_are_not_written() -> None:
    s = blocks()
    s.begin(StepPlan(1, enter=(enter(2, 1),)))
    with pytest.raises(AssertionError, match="read by another"):
        s.write(StepRow(2, 1, 3, (9,), new_blocks=(3,)), (9,))
    with pytest.raises(AssertionError, match="no block at 9"):
        s.write(StepRow(1, 0, 6, (6, 7, 8)), (6, 7, 8))
    with pytest.raises(AssertionError, match="gap before 8"):
        s.write(StepRow(1, 0, 8, (8,), new_blocks=(6,)), (8,))


def test_a_copy_reads_what_is_written_and_writes_what_nobody_reads() -> None:
    s = blocks()
    with pytest.raises(AssertionError, match="holds fewer"):
        s.apply(Copy(4, 5, 3))
    with pytest.raises(AssertionError, match="is read"):
        s.apply(Copy(3, 4, 1))
    s.begin(StepPlan(1, leave=(1,), memory=(Copy(3, 4, 1),)))
    assert s.held(0) == []
