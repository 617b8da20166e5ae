"""Editing tasks: every answer follows from its question."""

import json
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


def test_csv_becomes_json_with_its_keys_and_values() -> None:
    rng = Random(6)
    for _ in range(100):
        ((question, answer),) = EDITING._csv(rng)
        if answer.startswith("["):
            for record in json.loads(answer):
                assert all(key in question for key in record)
                assert all(str(value) in question for value in record.values())


def test_an_ordered_list_has_the_items_of_the_question_and_no_others() -> None:
    rng = Random(7)
    for _ in range(200):
        ((question, answer),) = EDITING._order(rng)
        assert all(word in question for word in answer.replace(",", " ").split())
        assert len(answer) < len(question)


def test_what_is_extracted_stands_in_the_question_in_this_order() -> None:
    rng = Random(8)
    for _ in range(200):
        ((question, answer),) = EDITING._extract(rng)
        at = -1
        for item in answer.split("\n"):
            at = question.index(item, at + 1)


def test_what_is_removed_is_gone() -> None:
    rng = Random(9)
    for _ in range(200):
        ((question, answer),) = EDITING._remove(rng)
        assert len(answer) < len(question)
