"""The training text: seeded, in the right shares, with answers that are right."""

import json
import re
from collections import Counter
from itertools import islice
from random import Random

import facts as table
import pytest
from conversations import SHARES, conversations
from copying import Copying
from grammar import phrase
from noise import roughen
from refusing import Refusals
from sums import Sums

FACTS = table.build()


def test_the_same_seed_writes_the_same_text() -> None:
    first, second = (list(islice(conversations(FACTS, 3), 200)) for _ in range(2))
    assert first == second
    assert first != list(islice(conversations(FACTS, 4), 200))


def test_copying_is_between_15_and_20_per_cent() -> None:
    assert sum(SHARES.values()) == 100
    kinds = Counter(kind for kind, _ in islice(conversations(FACTS, 8), 4000))
    assert 0.15 <= (kinds["copy"] + kinds["infill"]) / 4000 <= 0.22


def test_roles_alternate_and_no_text_is_empty() -> None:
    for kind, talk in islice(conversations(FACTS, 6), 1500):
        if kind == "infill":
            assert [r for r, _ in talk] == ["prefix", "suffix", "middle"]
            continue
        roles = [r for r, _ in talk if r != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        for role, text in talk:
            assert text.strip(), (kind, role)
            assert role != "assistant" or text == text.lstrip(), text
            pasted = "\n" in text or kind in ("copy", "chain")
            assert pasted or not re.search(r"<\w+>|\{\w*\}", text), text


def test_each_intent_has_several_hundred_phrasings() -> None:
    from asking import Topics

    topics, rng = Topics(FACTS), Random(1)
    for name in ("command.pull", "what.kv", "key.stop", "exit.3", "advice.oom"):
        topic = topics.by_id[name]
        assert len({topics.question(topic, rng)[0] for _ in range(600)}) > 400, name


@pytest.mark.parametrize("seed", range(6))
def test_an_edited_record_stays_valid_json(seed: int) -> None:
    rng, copying = Random(seed), Copying(FACTS)
    for _ in range(40):
        edited = copying._edit_record(rng)[0][1].removeprefix("```json\n").removesuffix("\n```")
        assert isinstance(json.loads(edited), dict)


def test_repeating_says_exactly_the_text() -> None:
    rng, copying = Random(2), Copying(FACTS)
    for _ in range(100):
        ((question, answer),) = copying._repeat(rng)
        assert answer in question


def test_sums_come_from_the_table_or_give_the_formula() -> None:
    sums = Sums(FACTS)
    assert sums._weights_answer("7", "4").startswith("3.5 GB: 7 billion × 4 / 8.")
    outside = sums._weights_answer("23", "4")
    assert "23 × 4 / 8" in outside
    assert "localchat fit" in outside
    assert not re.search(r"\d GB", outside)


def test_short_questions_change_one_thing_of_the_sum_before() -> None:
    from rates import Sum

    step = Sums(FACTS).after(Sum("memory", "8", ""), Random(4))
    assert step is not None
    question, answer, about = step
    assert about.subject in question
    assert answer == FACTS["memory"][about.subject]


def test_of_a_card_with_several_memories_the_one_that_was_named_counts() -> None:
    sums, rng, unnamed = Sums(FACTS), Random(2), 0
    for _ in range(300):
        question, answer, about = sums._card_of_several(rng)
        if "There are several" in answer:
            unnamed += 1
            continue
        assert re.search(rf"\b{about.subject} ?gb", question, re.I)
        assert answer == FACTS["memory"][about.subject]
    assert 30 < unnamed < 120


def test_refusals_are_honest_and_name_what_the_guide_is() -> None:
    rng, refusals = Random(9), Refusals(FACTS)
    for _ in range(300):
        question, answer = refusals.draw(rng)
        assert question.strip()
        assert re.search(r"cannot|do not know|know no|did not understand", answer)


def test_an_unknown_word_is_copied_as_it_was_written() -> None:
    rng, refusals = Random(3), Refusals(FACTS)
    for _ in range(300):
        question, answer = refusals._unknown_part(rng)
        assert answer.split("`")[1] in question


def test_careless_questions_are_a_third_and_keep_something() -> None:
    text = "how do i download a model from the hub and where is it stored on my machine"
    drawn = [roughen(text, Random(n), dress=False) for n in range(600)]
    assert all(len(one.split()) >= 3 for one in drawn)
    assert sum(len(one.split()) < 13 for one in drawn) > 120


def test_a_phrase_comes_from_the_pattern() -> None:
    seen = {phrase("(a|b) <x>[?]", {"x": ["c", "d"]}, Random(n)) for n in range(40)}
    assert seen == {"a c?", "a d?", "b c?", "b d?"}


def test_noise_keeps_numbers_and_names_whole() -> None:
    for n in range(300):
        assert "qwen2.5:7b-q4_k_m" in roughen(
            "please pull qwen2.5:7b-q4_k_m today", Random(n)
        ).replace("W/", "w/")


def test_wordings_by_hand_are_asked_as_they_stand() -> None:
    from asking import Topics

    topics = Topics(FACTS)
    topic = topics.by_id["command.pull"]
    asked = [topics._core(topic, Random(n)) for n in range(400)]
    assert sum(text in topic["said"] for text in asked) > 80


def test_texts_to_sort_count_extract_or_convert_are_refused() -> None:
    from pasting import Pasting

    pasting, rng = Pasting(FACTS, Refusals(FACTS).lexicon), Random(4)
    drawn = [pasting.draw(rng) for _ in range(2500)]
    for word in ("extract", "json", "bullet", "sort", "how many"):
        assert any(word in question.lower() for question, _ in drawn), word
    assert {answer for _, answer in drawn} == {FACTS["pastes"]["answer"]}
