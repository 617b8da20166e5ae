"""The evaluation set is frozen, complete, and not in the training text."""

import hashlib
import re
from itertools import islice
from pathlib import Path
from random import Random

import evaluate
from conversations import Writer, conversations, read_facts
from held_out import EVAL, forbidden, items, runs
from product import refusal

FACTS = read_facts(Path(evaluate.__file__).with_name("facts.json"))


def test_the_files_are_those_that_were_frozen() -> None:
    lines = (EVAL / "SHA256SUMS").read_text().splitlines()
    listed = {name: digest for digest, name in (line.split() for line in lines)}
    assert set(listed) == {"questions.jsonl", "offtopic.jsonl", "dialogues.jsonl"}
    for name, digest in listed.items():
        assert hashlib.sha256((EVAL / name).read_bytes()).hexdigest() == digest, name


def test_there_are_enough_items_and_every_pattern_compiles() -> None:
    questions, offtopic, dialogues = (
        list(items(n)) for n in ("questions", "offtopic", "dialogues")
    )
    assert (len(questions) >= 150, len(offtopic), len(dialogues)) == (True, 40, 20)
    assert len({q["question"] for q in questions}) == len(questions)
    for item in questions + dialogues:
        assert item["facts"]
        for pattern in item["facts"]:
            re.compile(pattern)


def test_no_eight_words_in_a_row_are_shared_with_the_training_text() -> None:
    barred = forbidden()
    assert barred
    for _, talk in islice(conversations(FACTS, 5), 4000):
        for _, text in talk:
            assert not runs(text) & barred, text


def test_a_shared_run_of_words_is_seen_through_capitals_and_marks() -> None:
    text = "How MUCH memory, do the weights (of a 7B model) take?"
    assert runs(text) & forbidden()


def test_the_filter_has_work_to_do_so_the_test_above_can_fail() -> None:
    rng, writer, barred = Random(5), Writer(FACTS), forbidden()
    talks = (writer.draw(rng)[1] for _ in range(6000))
    assert any(runs(text) & barred for talk in talks for _, text in talk)


def test_an_invented_quantity_and_a_wrong_one_count_as_wrong_numbers() -> None:
    known = evaluate.known_quantities(FACTS)
    plain = {"question": "how much?"}
    sized = {"question": "7B at 4 bits?", "quantity": "3[.]5 ?GB"}
    assert not evaluate.wrong_number(plain, "It takes 3.5 GB.", known)
    assert evaluate.wrong_number(plain, "It takes 123.45 GB.", known)
    assert evaluate.wrong_number(sized, "It takes 14 GB.", known)
    assert not evaluate.wrong_number(sized, "3.5 GB: 7 billion × 4 / 8.", known)


def test_commands_that_the_program_would_refuse_are_found() -> None:
    assert not refusal('localchat -x "a loop" > loop.sh')
    assert not refusal("localchat fit MODEL --ctx N | less")
    assert not refusal("localchat completion bash|zsh|fish")
    assert "verb" in refusal("localchat frobnicate")
    assert "--frob" in refusal("localchat list --frob")
    assert refusal("localchat config burn KEY")
