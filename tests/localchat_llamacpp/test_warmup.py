"""Which numbers of rows compute bit-equal logits, from what a warm-up measures."""

import numpy as np
import pytest

from localchat_llamacpp.warmup import row_classes


@pytest.mark.parametrize(
    ("kinds", "lone_joins", "expected"),
    [
        ("ABBBBBB", False, ((1, 1), (2, 7))),
        ("AAAAAAA", False, ((1, 1), (2, 7))),
        ("AAAAAAA", True, ((1, 7),)),
        ("ABBBBBB", True, ((1, 1), (2, 7))),
        ("ABBCCCC", False, ((1, 1), (2, 3), (4, 7))),
        ("AAACCCC", True, ((1, 1), (2, 3), (4, 7))),
        ("ABCDEFG", False, ((1, 1),)),
    ],
)
def test_classes_are_claimed_only_where_the_bits_are_equal(
    kinds: str, lone_joins: bool, expected: tuple[tuple[int, int], ...]
) -> None:
    def bits(rows: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        return np.array([ord(kinds[rows - 1])], np.uint32)

    assert row_classes(bits, lone_joins=lone_joins) == expected
