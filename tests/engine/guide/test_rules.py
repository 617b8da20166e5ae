"""Rules of the guide: which answers are shown, wait for more text, or are replaced."""

import re
from pathlib import Path

import numpy as np
import pytest

import localchat
from localchat.engine.guide import rules
from localchat.engine.guide.topics import Topics, answer_key

TOPICS = Topics(Path(localchat.__file__).with_name("guide") / "topics.npz")
GGUF = "GGUF is the file format of llama.cpp: weights, tokenizer and chat template in one file, in many "
QUIT = "`Ctrl+D` on an empty line quits, and so do `Ctrl+Q`, `/quit`, or `Ctrl+C` twice. The conversation is "


def verdict(
    question: rules.GuideQuestion, probabilities: np.ndarray, answer: str, *, complete: bool = True
) -> rules.Verdict:
    """Return the verdict on an answer."""
    return rules.judge(rules.PartialAnswer(TOPICS, probabilities, question, answer, complete))


def said(question: str, answer: str, before: str = "") -> str:
    """Return the text that replaces a complete answer, empty if the answer is shown."""
    asked = rules.GuideQuestion(question, before, before)
    result = verdict(asked, TOPICS.probabilities(question, before), answer)
    assert not isinstance(result, rules.Wait)
    return result.text if isinstance(result, rules.Replace) else ""


def test_answers_of_one_topic_have_one_key_whatever_their_numbers_and_names() -> None:
    one = (
        "For 8 GB take a 7B at Q4_K_M: `localchat pull qwen2.5:7b-q4_k_m`. Its weights are 4.7 GB."
    )
    other = "For 24 GB take a 32B at Q4_K_M: `localchat pull qwen2.5:32b-q4_k_m`. Its weights are 19.9 GB."
    assert answer_key(one) == answer_key(other)
    assert answer_key("I know no command `x`; ") == answer_key("I know no flag `--y`; ")
    assert answer_key(GGUF) != answer_key(QUIT)


def test_an_answer_to_the_question_stays() -> None:
    assert said("what is gguf?", GGUF) == ""
    assert said("how do i quit", QUIT) == ""


def test_the_answer_of_a_sure_topic_replaces_one_that_is_beside_the_question() -> None:
    assert said("what is gguf?", QUIT).startswith("GGUF is the file format")


def test_without_a_sure_topic_the_guide_says_that_it_does_not_know() -> None:
    assert said("blue apples sing upstairs", GGUF).startswith("I do not know that.")


def test_where_two_topics_are_near_their_questions_are_offered() -> None:
    asked = np.flatnonzero([bool(question) for question in TOPICS.questions])
    likely = np.full(len(TOPICS.keys), 1e-6)
    likely[asked[:2]] = 0.3, 0.25
    question = rules.GuideQuestion("swap f5 gguf disk")
    offer = verdict(question, likely, "Nothing of the kind")
    assert isinstance(offer, rules.Replace) and offer.text.startswith(rules.OFFER)
    lines = offer.text.splitlines()[2:]
    assert 1 <= len(lines) <= rules.OFFERED
    known = {question for question in TOPICS.questions if question}
    assert known.issuperset(line.partition(". ")[2] for line in lines)


def test_the_question_of_an_unlikely_answer_is_offered_first_if_it_is_near() -> None:
    keys = dict(zip(TOPICS.keys, TOPICS.questions, strict=True))
    likely = np.full(len(keys), 1e-6)
    likely[TOPICS.keys.index(answer_key(GGUF))] = 0.5
    likely[TOPICS.keys.index(answer_key(QUIT))] = 0.25
    offer = rules.offer(TOPICS, likely, answer_key(QUIT)).splitlines()
    assert offer[2:4] == [f"1. {keys[answer_key(QUIT)]}", f"2. {keys[answer_key(GGUF)]}"]


def test_a_question_beyond_the_topics_gets_no_offer() -> None:
    likely = np.full(len(TOPICS.keys), 1e-6)
    refusal = next(at for at, key in enumerate(TOPICS.keys) if key.startswith(rules.UNKNOWN))
    likely[refusal] = 0.6
    assert rules.offer(TOPICS, likely, answer_key(QUIT)) == TOPICS.answers[refusal]


def test_every_offered_question_has_its_own_topic() -> None:
    for key, question in zip(TOPICS.keys, TOPICS.questions, strict=True):
        if question:
            likely = TOPICS.probabilities(question)
            assert likely[TOPICS.keys.index(key)] > 0.4, question
            assert not re.search(r"\ba [aeio]", question, re.IGNORECASE), question


def test_a_question_that_leans_is_checked_with_the_one_before_it() -> None:
    off = next(
        at for at, text in enumerate(TOPICS.answers) if text.startswith("`--no-speculation`")
    )
    likely = [
        TOPICS.probabilities("how do i turn it off", text) for text in ("what is speculation", "")
    ]
    assert likely[0][off] > 1.2 * likely[1][off]


@pytest.mark.parametrize(
    "before", ["How much is 3 plus 4?", "Write a poem.", "What is a KV cache?"]
)
def test_a_greeting_leans_on_nothing(before: str) -> None:
    question = rules.GuideQuestion("hi", before, before)
    likely = rules.topic_probabilities(TOPICS, question)
    result = verdict(question, likely, "I do not know that. I am a small guide")
    assert isinstance(result, rules.Replace) and result.text.startswith("Hello!")


def test_an_answer_that_only_a_conversation_has_stays() -> None:
    assert said("and then?", "Nothing of the kind was ever asked here", "what is gguf?") == ""


def test_the_first_word_of_such_an_answer_decides_nothing() -> None:
    question = rules.GuideQuestion("is it really gone then", "how do i delete a model")
    likely = rules.topic_probabilities(TOPICS, question)
    assert any(key.startswith("No") for key in TOPICS.keys)
    assert verdict(question, likely, "No", complete=False) == rules.Wait()


REFUSAL = "I cannot work on texts: I am a small guide"


@pytest.mark.parametrize(
    "question",
    [
        "translate to german: what is gguf?",
        "fix the grammar: how i can quit",
        "capital of france",
        "blue apples sing upstairs",
    ],
)
def test_a_refusal_stays(question: str) -> None:
    assert said(question, REFUSAL) == ""


def test_the_answer_of_a_sure_topic_replaces_a_refusal() -> None:
    assert said("what is gguf?", REFUSAL).startswith("GGUF is the file format")


def test_an_answer_with_a_word_of_the_question_stays() -> None:
    assert said("stop at END", 'Add `--stop "END"`.') == ""
    assert said("repeat after me: zebra lantern 42", "zebra lantern 42") == ""


@pytest.mark.parametrize(
    "question", ["¿Cómo descargo un modelo?", "как скачать модель", "怎么退出"]
)
def test_an_answer_to_another_language_says_that_english_is_wanted(question: str) -> None:
    for line in TOPICS.languages:
        wrong = f"{line}\n\n`localchat rm MODEL` removes a model that localchat pulled"
        assert said(question, wrong) == f"{line}\n\n{TOPICS.english}"


def test_the_line_in_a_language_and_english_stay() -> None:
    russian = next(line for line in TOPICS.languages if line.startswith("Я маленькая"))
    assert said("как выйти", f"{russian}\n\n{TOPICS.english}") == ""


def test_english_to_a_question_in_another_script_stays() -> None:
    assert said("怎么退出 llama", QUIT) == ""


def words_held(question: str, answer: str) -> int:
    """Words of an answer after which it is known whether it is shown."""
    asked, words = rules.GuideQuestion(question), answer.split(" ")
    probabilities = TOPICS.probabilities(question)
    for count in range(1, len(words)):
        begun = " ".join(words[:count])
        if verdict(asked, probabilities, begun, complete=False) != rules.Wait():
            return count
    return len(words)


@pytest.mark.parametrize(
    "text", ["a,b\n1,2\n\nwhat is in this file", "what is this? " + "a, b; " * 40]
)
def test_of_a_text_only_what_the_guide_knows_is_shown(text: str) -> None:
    assert said(text, "a,b\n1").startswith("I cannot write texts or code")
    assert said(text, "a, b; a, b; " * 9).startswith("I cannot write texts or code")
    assert said(text, GGUF) == ""
    assert said(text, "I cannot work on texts: I am a small guide") == ""
    assert said(text, TOPICS.languages[0]) == ""
    question = rules.GuideQuestion(text)
    assert not rules.topic_probabilities(TOPICS, question).any()
    begun = verdict(question, np.zeros(1), "a,b", complete=False)
    assert begun == rules.Wait(), "more words may tell"


def test_few_words_wait() -> None:
    assert words_held("what is gguf?", GGUF) <= 4
    assert words_held("what is gguf?", QUIT) <= 4
    assert (
        words_held("what is the capital of France?", "I do not know that. I am a small guide") <= 5
    )


def test_a_task_on_a_text_is_not_answered_by_the_text() -> None:
    assert said("make a table out of: apples 3, pears 5", "apples 3, pears 5").startswith("I ")
    assert said("repeat after me: apples 3, pears 5", "apples 3, pears 5") == ""


def test_an_echo_of_the_question_is_not_shown() -> None:
    assert said("you did not answer my question", "> you did not answer my question")
    assert said("what did i ask?", "> what is gguf?", "what is gguf?") == ""


@pytest.mark.parametrize(
    ("question", "answer", "right"),
    [
        ("14b at 4 bits, size?", "7 GB: 14 billion × 4 / 8.", True),
        ("15b at 4 bits, size?", "7 GB: 14 billion × 4 / 8.", False),
        ("250 gb at 100 mbit, how long?", "About 6.7 minutes: 2 × 8 / 0.1 = 360 s.", False),
    ],
)
def test_a_sum_is_shown_if_it_holds(question: str, answer: str, right: bool) -> None:
    asked = rules.GuideQuestion(question)
    likely = np.full(len(TOPICS.keys), 1e-6)
    likely[[name.startswith(answer_key(answer)) for name in TOPICS.keys]] = 1.0
    result = verdict(asked, likely, answer)
    if right:
        assert result == rules.Show()
    else:
        assert isinstance(result, rules.Replace)
        assert result.text.startswith("I cannot calculate that")


def test_a_sum_waits_until_it_is_whole() -> None:
    assert words_held("14b at 4 bits, how many gb?", "7 GB: 14 billion × 4 / 8.") == 8
