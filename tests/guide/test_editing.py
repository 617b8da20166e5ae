"""Editing tasks: every answer follows from its question."""

from random import Random

import facts as table
import pytest
from copying import Copying
from scraps import count, renamed

FACTS = table.build()
EDITING = Copying(FACTS).editing


def test_renaming_takes_whole_names_and_all_of_them() -> None:
    assert renamed("foo = foobar + my_foo + foo", "foo", "x") == "x = foobar + my_foo + x"
    assert count("foo = foobar + my_foo + foo", "foo") == 2


@pytest.mark.parametrize("seed", range(4))
def test_no_task_is_empty_or_has_a_place_left_in_it(seed: int) -> None:
    rng = Random(seed)
    for _ in range(300):
        for question, answer in EDITING.draw(rng):
            assert question.strip()
            assert answer.strip() == answer
            assert "{a}" not in question
            assert "{n}" not in question


def test_every_task_is_drawn() -> None:
    rng = Random(3)
    for kind in EDITING.kinds:
        assert all(len(turn) == 2 for turn in kind(rng)), kind


def test_a_quoted_part_stands_in_the_question() -> None:
    rng = Random(5)
    for _ in range(200):
        ((question, answer),) = EDITING._part(rng)
        assert answer.removeprefix("> ") in question


def test_what_is_removed_is_gone() -> None:
    rng = Random(9)
    for _ in range(200):
        ((question, answer),) = EDITING._remove(rng)
        assert len(answer) < len(question)
