"""Counting of shared cells, beside the plainest possible count."""

import hypothesis.strategies as st
from hypothesis import given, settings

from localchat.core.kv_cache.slot_cells import Cells
from tests.support.cache_integrity import check_cells

VERB = st.tuples(
    st.sampled_from(["extend", "share", "truncate"]),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 9),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(VERB, max_size=40))
def test_every_cell_is_counted_once_whoever_holds_it(
    verbs: list[tuple[str, int, int, int]],
) -> None:
    cells = Cells(40)
    plain: dict[int, list[object]] = {slot: [] for slot in range(4)}
    for verb, slot, other, tokens in verbs:
        if verb == "extend" and tokens <= cells.free:
            cells.extend(slot, tokens)
            plain[slot] = plain[slot] + [object() for _ in range(tokens)]
        elif verb == "share" and not plain[other] and 0 < tokens <= len(plain[slot]):
            cells.share(slot, other, tokens)
            plain[other] = plain[slot][:tokens]
        elif verb == "truncate" and tokens <= len(plain[slot]):
            cells.truncate(slot, tokens)
            plain[slot] = plain[slot][:tokens]
        check_cells(cells)
        everything = [cell for used_by in plain.values() for cell in used_by]
        distinct = set(everything)
        assert cells.free == 40 - len(distinct)
        assert cells.shared == sum(everything.count(cell) > 1 for cell in distinct)
        assert [cells.used_by(slot) for slot in range(4)] == [len(plain[slot]) for slot in range(4)]


def test_truncating_a_shared_segment_leaves_other_slots_whole() -> None:
    cells = Cells(20)
    cells.extend(0, 10)
    cells.share(0, 1, 10)
    cells.share(1, 2, 7)
    cells.truncate(1, 4)
    check_cells(cells)
    assert [cells.used_by(slot) for slot in range(3)] == [10, 4, 7]
    assert (cells.free, cells.shared) == (10, 7)
