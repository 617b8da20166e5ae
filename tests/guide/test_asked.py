"""Unusual questions: pasted texts, two questions in one, other languages."""

import re
import tomllib
from pathlib import Path
from random import Random

import facts as table
from asking import ABSENT, FAMILIES, PAIR_CHARS, SEVERAL, Topics, family
from conversations import Writer
from copying import Copying
from foreign import Foreign
from product import refusal
from refusing import UNKNOWN

ROOT = Path(__file__).parents[2]
FACTS = table.build()
WRITER = Writer(FACTS)


def test_two_questions_in_one_get_both_answers() -> None:
    topics, rng = Topics(FACTS), Random(1)
    whole = {t["answer"] for t in topics.all if "slot" not in t}
    both = 0
    for _ in range(300):
        question, answer = topics.pair(rng)
        assert question.strip()
        assert "{n}" not in question
        assert "{v}" not in answer
        assert len(answer) <= 2 * PAIR_CHARS + 20
        both += any(answer.startswith(a) and answer != a for a in whole)
    assert both > 200


def test_a_family_without_a_size_has_the_sizes_of_the_catalogue() -> None:
    known = tomllib.loads((ROOT / "models.toml").read_text("utf-8"))["models"]
    for name, (_, sizes) in FAMILIES.items():
        of_it = {one.partition(":")[2] for one in known if one.partition(":")[0] == name}
        dated = re.compile(r"-\d{4}$")  # newer versions of a size
        assert set(sizes.split()) == {size for size in of_it if not dated.search(size)}
    told, rng = {family(rng) for rng in map(Random, range(400))}, Random(4)
    for _, answer in told:
        assert all(name in known for name in re.findall(r"[a-z0-9.-]+:[a-z0-9.-]+b", answer))
    assert len({answer for _, answer in told}) == len(FAMILIES) + len(SEVERAL)
    topics = Topics(FACTS)
    question, answer = topics.question(topics.by_id["pull.family"], rng)
    assert "{n}" not in question
    assert answer.startswith("`localchat pull ")


def test_models_of_the_catalogue_are_never_called_missing() -> None:
    other = next(topic for topic in FACTS["topics"] if topic["id"] == "pull.other_name")
    words = " ".join((*other["do"], *other["ask"], *other["kw"]))
    for said, _ in FAMILIES.values():
        for name in said.split("|"):
            assert not re.search(rf"[(| ]{re.escape(name)}[)|]", words), name


def test_lines_from_the_screen_get_the_answer_of_their_topic() -> None:
    topics, rng = Topics(FACTS), Random(2)
    saying = [t for t in topics.all if "says" in t]
    assert len(saying) > 20
    for topic in saying:
        for _ in range(20):
            question, answer = topics.pasted(topic, rng)
            assert answer == topic["answer"]
            assert "{w}" not in question
            assert "{n}" not in question


def test_a_pasted_text_with_a_task_beyond_the_guide_is_refused_honestly() -> None:
    rng = Random(3)
    for _ in range(400):
        question, answer = WRITER.pasting.draw(rng)
        assert "{w}" not in question
        assert "{n}" not in question
        assert answer.startswith("I cannot work on texts")


def test_a_task_on_a_line_of_text_keeps_the_text_and_is_refused() -> None:
    rng = Random(8)
    for _ in range(600):
        question = WRITER.pasting._task(rng)
        assert "{" not in question.replace("{}", "")
        assert len(question.replace(":", " ").split()) > 1


def test_other_languages_get_a_line_in_that_language_and_english() -> None:
    foreign, rng = Foreign(FACTS), Random(4)
    lines = {tongue["answer"] for tongue in foreign.tongues.values()}
    english = {t["answer"] for t in FACTS["topics"]} | {FACTS["foreign"]["english"]}
    seen = [foreign.draw(rng)[1].split("\n\n", 1) for _ in range(1500)]
    assert {line for line, _ in seen} == lines
    assert {rest for _, rest in seen} <= english
    assert {*foreign.tongues, "english"} == set(FACTS["foreign"])


def test_a_detail_read_from_a_text_is_in_it() -> None:
    reading, rng = Copying(FACTS).reading, Random(5)
    for _ in range(400):
        ((question, answer),) = reading.draw(rng)
        last = answer.removeprefix("in ").removeprefix("the ")
        assert last in question


def test_a_slot_fills_a_question_and_its_answer_with_the_same_word() -> None:
    topics, rng = Topics(FACTS), Random(6)
    for name in ("absent.any", "exit.other", "move.ngl_value"):
        for _ in range(50):
            question, answer = topics.question(topics.by_id[name], rng)
            assert "{" not in question + answer


def test_a_question_that_leans_on_any_topic_is_answered() -> None:
    topics, rng = Topics(FACTS), Random(7)
    topic = topics.by_id["flag.temperature"]
    steps = [step for _ in range(300) if (step := topics.after(topic, rng))]
    assert any(answer == topic["answer"] for _, answer, _ in steps)
    assert any(led and led["id"] == "talk.thanks" for _, _, led in steps)


def test_names_the_guide_calls_unknown_are_unknown_to_the_program() -> None:
    from localchat.session.commands import COMMANDS

    for word in UNKNOWN["command"]:
        assert "is not a verb" in refusal(f"localchat {word}"), word
    for word in UNKNOWN["flag"]:
        assert refusal(f"localchat --{word}"), word
        assert refusal(f"localchat serve --{word}"), word
    slash = {name for command in COMMANDS for name in (command.name, *command.aliases)}
    assert not slash & set(UNKNOWN["slash command"])


def test_features_the_guide_calls_absent_are_absent() -> None:
    names = {name.strip("-/") for name in table.FLAGS + table.VERBS + table.SLASH}
    assert not names & {name.replace(" ", "-") for name in ABSENT}
