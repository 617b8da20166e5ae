"""The guide's engine: what is checked, what is said instead, and the stream of an answer that is checked."""

import re
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

import localchat
from localchat.engine.events import (
    Accepted,
    Done,
    Event,
    Finished,
    Speculation,
    Text,
    Timings,
    TokenLogprob,
    Usage,
)
from localchat.engine.guide import engine as guide
from localchat.engine.guide.topics import Topics, answer_key
from localchat.engine.request import (
    GenerateRequest,
    Grammar,
    Message,
    Messages,
    Sampling,
    TextPrompt,
)
from localchat.engine.stream import Stream
from localchat.errors import EngineDied

TOPICS = Topics(Path(localchat.__file__).with_name("guide") / "topics.npz")
GGUF = "GGUF is the file format of llama.cpp: weights, tokenizer and chat template in one file, in many "
QUIT = "`Ctrl+D` on an empty line quits, and so do `Ctrl+Q`, `/quit`, or `Ctrl+C` twice. The conversation is "
_TIMINGS = Timings(0.0, 0.0, None, None, None, None, None, None, 0.0)
DONE = Done(Usage(5, 0, 9), _TIMINGS, 0, 0, Speculation(), "print")


def asked(*contents: str, **changes: object) -> GenerateRequest:
    """A conversation whose odd messages are the user's."""
    messages = tuple(
        Message("assistant" if at % 2 else "user", text) for at, text in enumerate(contents)
    )
    return msgspec.structs.replace(GenerateRequest(Messages(messages)), **changes)


def said(question: str, answer: str, before: str = "") -> str:
    """What is said instead of a whole answer."""
    asked = guide.GuideQuestion(question, before, before)
    other = guide.checked_answer(TOPICS, TOPICS.probabilities(question, before), asked, answer)
    assert other is not None
    return other


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
    question = guide.GuideQuestion("swap f5 gguf disk")
    offer = guide.checked_answer(TOPICS, likely, question, "Nothing of the kind")
    assert offer is not None and offer.startswith(guide.OFFER)
    lines = offer.splitlines()[2:]
    assert 1 <= len(lines) <= guide.OFFERED
    known = {question for question in TOPICS.questions if question}
    assert known.issuperset(line.partition(". ")[2] for line in lines)


def test_the_question_of_an_unlikely_answer_is_offered_first_if_it_is_near() -> None:
    keys = dict(zip(TOPICS.keys, TOPICS.questions, strict=True))
    likely = np.full(len(keys), 1e-6)
    likely[TOPICS.keys.index(answer_key(GGUF))] = 0.5
    likely[TOPICS.keys.index(answer_key(QUIT))] = 0.25
    offer = guide.offer(TOPICS, likely, answer_key(QUIT)).splitlines()
    assert offer[2:4] == [f"1. {keys[answer_key(QUIT)]}", f"2. {keys[answer_key(GGUF)]}"]


def test_a_question_beyond_the_topics_gets_no_offer() -> None:
    likely = np.full(len(TOPICS.keys), 1e-6)
    refusal = next(at for at, key in enumerate(TOPICS.keys) if key.startswith(guide.UNKNOWN))
    likely[refusal] = 0.6
    assert guide.offer(TOPICS, likely, answer_key(QUIT)) == TOPICS.answers[refusal]


def test_every_offered_question_has_its_own_topic() -> None:
    for key, question in zip(TOPICS.keys, TOPICS.questions, strict=True):
        if question:
            likely = TOPICS.probabilities(question)
            assert likely[TOPICS.keys.index(key)] > 0.4, question
            assert not re.search(r"\ba [aeio]", question, re.IGNORECASE), question


OFFERED = f"{guide.OFFER}\n\n1. What is GGUF?\n2. How do I quit?"


@pytest.mark.parametrize(
    ("last", "question"),
    [("1", "What is GGUF?"), (" 2. ", "How do I quit?"), ("(1)", "What is GGUF?")],
)
def test_a_number_picks_an_offered_question_which_stands_alone(last: str, question: str) -> None:
    request = asked("help me with the file", OFFERED, last)
    assert isinstance(request.prompt, Messages)
    told = Messages((Message("system", "Be brief."), *request.prompt.messages))
    chosen = guide.picked(msgspec.structs.replace(request, prompt=told)).prompt
    assert isinstance(chosen, Messages)
    assert chosen.messages == (Message("system", "Be brief."), Message("user", question))


@pytest.mark.parametrize(
    "request_",
    [
        asked("2"),
        asked("what?", "GGUF is 1.", "1"),
        asked("what?", OFFERED, "3"),
        asked("a", OFFERED, "no"),
    ],
)
def test_other_messages_pick_nothing(request_: GenerateRequest) -> None:
    assert guide.picked(request_) is request_


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
    question = guide.GuideQuestion("hi", before, before)
    likely = guide.likely_topics(TOPICS, question)
    said = guide.checked_answer(TOPICS, likely, question, "I do not know that. I am a small guide")
    assert said is not None and said.startswith("Hello!")


def test_an_answer_that_only_a_conversation_has_stays() -> None:
    assert said("and then?", "Nothing of the kind was ever asked here", "what is gguf?") == ""


def test_the_first_word_of_such_an_answer_decides_nothing() -> None:
    question = guide.GuideQuestion("is it really gone then", "how do i delete a model")
    likely = guide.likely_topics(TOPICS, question)
    assert any(key.startswith("No") for key in TOPICS.keys)
    assert guide.checked_answer(TOPICS, likely, question, "No", whole=False) is None


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
    asked, words = guide.GuideQuestion(question), answer.split(" ")
    probabilities = TOPICS.probabilities(question)
    for count in range(1, len(words)):
        begun = " ".join(words[:count])
        if guide.checked_answer(TOPICS, probabilities, asked, begun, whole=False) is not None:
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
    question = guide.GuideQuestion(text)
    assert not guide.likely_topics(TOPICS, question).any()
    begun = guide.checked_answer(TOPICS, np.zeros(1), question, "a,b", whole=False)
    assert begun is None, "more words may tell"


def test_few_words_wait() -> None:
    assert words_held("what is gguf?", GGUF) <= 4
    assert words_held("what is gguf?", QUIT) <= 4
    assert (
        words_held("what is the capital of France?", "I do not know that. I am a small guide") <= 5
    )


@pytest.mark.parametrize(
    ("request_", "question"),
    [
        (asked("What is GGUF?"), ("What is GGUF?", "", "")),
        (asked("What is GGUF?", "It.", "How do I quit?"), ("How do I quit?", "", "What is GGUF?")),
        (
            asked("What is GGUF?", "It.", "and how do I open it?"),
            ("and how do I open it?", "What is GGUF?", "What is GGUF?"),
        ),
        (asked("a?", "A.", "b?", "B.", "why?"), ("why?", "b?", "a?\0b?")),
        (asked("x" * 300), ("x" * 300, "", "")),
        (asked("a?", "A.", "Sum it up:\na text"), ("Sum it up:\na text", "", "")),
        (asked("怎么退出"), ("怎么退出", "", "")),
        (asked("hi", max_tokens=5), ("hi", "", "")),
        (asked("hi", stop=("x",)), None),
        (asked("hi", n=2), ("hi", "", "")),
        (asked("hi", grammar=Grammar("regex", "yes|no")), None),
        (asked("hi", sampling=Sampling(logit_bias={1: 5.0})), None),
        (GenerateRequest(TextPrompt("hi")), None),
    ],
)
def test_what_the_classifier_can_judge_is_checked(
    request_: GenerateRequest, question: tuple[str, str, str] | None
) -> None:
    assert guide.checked_question(request_) == question


def shown(question: str, *events: Event) -> Sequence[Event]:
    """What a user sees of these events of the model."""
    inner = Stream(lambda: None)
    choices = 1 + max(each.choice for each in events if isinstance(each, Finished))
    answer = guide.CheckedAnswer(inner, TOPICS, guide.GuideQuestion(question), choices)
    inner.put(*events)
    answer.run()
    return list(answer.stream)


def text_shown(question: str, *events: Event) -> str:
    """The text of what a user sees."""
    return "".join(each.text for each in shown(question, *events) if isinstance(each, Text))


TABLE = TOPICS.answer(answer_key(GGUF))
END = (Finished(0, "stop"), DONE)


def test_a_right_answer_passes_as_it_comes() -> None:
    events = (Accepted(5, 100, 1), Text(0, TABLE[:50]), Text(0, TABLE[50:90]), Text(0, TABLE[90:]))
    assert shown("What is GGUF?", *events, *END) == [*events, *END]


@pytest.mark.parametrize(
    "words", [(TABLE[:90],), (TABLE[:60], TABLE[60:110], " It is green."), (TABLE[:85], "no")]
)
def test_an_answer_that_parts_from_the_table_goes_on_with_it(words: tuple[str, ...]) -> None:
    assert text_shown("What is GGUF?", *(Text(0, text) for text in words), *END) == TABLE


def test_both_answers_to_two_questions_are_shown() -> None:
    more = "\n\n" + TOPICS.answer(answer_key(QUIT))
    events = (Text(0, TABLE[:100]), Text(0, TABLE[100:] + more[:4]), Text(0, more[4:]))
    assert text_shown("What is GGUF? and how do I quit?", *events, *END) == TABLE + more


@pytest.mark.parametrize("more", ["\n\n" + QUIT, "\n\n" + TABLE, " "])
def test_a_second_answer_to_one_question_is_not_shown(more: str) -> None:
    events = (Text(0, TABLE[:100]), Text(0, TABLE[100:] + more[:1]), Text(0, more[1:]))
    assert text_shown("What is GGUF?", *events, *END).rstrip() == TABLE


def test_a_task_on_a_text_is_not_answered_by_the_text() -> None:
    assert said("make a table out of: apples 3, pears 5", "apples 3, pears 5").startswith("I ")
    assert said("repeat after me: apples 3, pears 5", "apples 3, pears 5") == ""


def test_an_echo_of_the_question_is_not_shown() -> None:
    assert said("you did not answer my question", "> you did not answer my question")
    assert said("what did i ask?", "> what is gguf?", "what is gguf?") == ""


def of_tokens(text: str, *logprobs: float) -> Text:
    """A piece of an answer with the log probabilities of its tokens."""
    return Text(0, text, tuple(TokenLogprob(1, b"x", each) for each in logprobs))


@pytest.mark.parametrize(
    ("logprobs", "right"), [((-0.0001, -0.0002), True), ((-0.0001, -1.0), False)]
)
def test_what_the_guide_is_certain_of_need_not_be_likely(
    monkeypatch: pytest.MonkeyPatch, logprobs: tuple[float, ...], right: bool
) -> None:
    possible = np.full(len(TOPICS.keys), 1e-6)
    possible[TOPICS.keys.index(answer_key(GGUF))] = 0.1
    possible[TOPICS.keys.index(answer_key(QUIT))] = 0.2
    monkeypatch.setattr(guide, "likely_topics", lambda *_: possible)
    text = text_shown("a file?", of_tokens(TABLE[:90], *logprobs), Text(0, TABLE[90:]), *END)
    assert (text == TABLE) is right


@pytest.mark.parametrize(("other", "right"), [(0.09, True), (0.11, False)])
def test_an_unlikely_answer_is_shown_if_no_other_topic_is_likelier(
    other: float, right: bool
) -> None:
    likely = np.full(len(TOPICS.keys), 1e-6)
    likely[TOPICS.keys.index(answer_key(GGUF))] = 0.1
    likely[TOPICS.keys.index(answer_key(QUIT))] = other
    instead = guide.checked_answer(TOPICS, likely, guide.GuideQuestion("a file?"), GGUF)
    assert instead is not None
    assert (instead == "") is right


def test_log_probabilities_that_nobody_asked_for_are_not_sent() -> None:
    for event in shown(
        "What is GGUF?", of_tokens(TABLE[:90], -0.1), of_tokens(TABLE[90:], 0.0), *END
    ):
        assert not isinstance(event, Text) or not event.logprobs


def test_an_answer_at_its_limit_of_tokens_is_not_continued() -> None:
    events = (Text(0, TABLE[:90]), Finished(0, "length"), DONE)
    assert text_shown("What is GGUF?", *events) == TABLE[:90]


@pytest.mark.parametrize(
    ("question", "answer", "right"),
    [
        ("14b at 4 bits, size?", "7 GB: 14 billion × 4 / 8.", True),
        ("15b at 4 bits, size?", "7 GB: 14 billion × 4 / 8.", False),
        ("250 gb at 100 mbit, how long?", "About 6.7 minutes: 2 × 8 / 0.1 = 360 s.", False),
    ],
)
def test_a_sum_is_shown_if_it_holds(question: str, answer: str, right: bool) -> None:
    asked = guide.GuideQuestion(question)
    likely = np.full(len(TOPICS.keys), 1e-6)
    likely[[name.startswith(answer_key(answer)) for name in TOPICS.keys]] = 1.0
    other = guide.checked_answer(TOPICS, likely, asked, answer)
    assert other is not None
    assert other == "" if right else other.startswith("I cannot calculate that")


def test_a_sum_waits_until_it_is_whole() -> None:
    assert words_held("14b at 4 bits, how many gb?", "7 GB: 14 billion × 4 / 8.") == 8


def test_no_word_of_a_wrong_answer_is_shown() -> None:
    events = shown(
        "What is GGUF?",
        Accepted(5, 100, 1),
        *(Text(0, QUIT[:50]), Text(0, QUIT[50:]), Text(0, "saved."), Finished(0, "length"), DONE),
    )
    accepted, text, finished, done = events
    assert accepted == Accepted(5, 100, 1)
    assert isinstance(text, Text)
    assert text.text.startswith("GGUF is the file format")
    assert (finished, done) == (Finished(0, "stop"), DONE)


def test_each_of_several_choices_is_checked() -> None:
    ends = (Finished(1, "stop"), Finished(0, "stop"), DONE)
    events = shown("What is GGUF?", Text(1, QUIT[:60]), Text(0, TABLE), Text(1, QUIT[60:]), *ends)
    texts = ["", ""]
    for each in events:
        if isinstance(each, Text):
            texts[each.choice] += each.text
    assert texts == [TABLE, TABLE]
    assert sorted(each.choice for each in events if isinstance(each, Finished)) == [0, 1]
    assert events[-1] == DONE


@pytest.mark.parametrize("words", [(QUIT,), (TABLE[:85], "no"), (TABLE[:90],)])
def test_an_answer_of_the_table_keeps_to_the_most_tokens(words: tuple[str, ...]) -> None:
    inner = Stream(lambda: None)
    question = guide.GuideQuestion("What is GGUF?")
    answer = guide.CheckedAnswer(inner, TOPICS, question, cut=lambda text: text[:110])
    inner.put(*(Text(0, text) for text in words), *END)
    answer.run()
    *texts, finished, _ = list(answer.stream)
    assert "".join(each.text for each in texts if isinstance(each, Text)) == TABLE[:110]
    assert finished == Finished(0, "length", limit="max_tokens")


def test_a_short_answer_is_checked_at_its_end() -> None:
    events = shown("What is GGUF?", Text(0, "`localchat pull x`"), Finished(0, "stop"), DONE)
    assert "".join(event.text for event in events if isinstance(event, Text)).startswith("GGUF")


def test_a_failure_reaches_the_user() -> None:
    inner = Stream(lambda: None)
    answer = guide.CheckedAnswer(inner, TOPICS, guide.GuideQuestion("What is GGUF?"))
    inner.put(Text(0, GGUF), EngineDied("it died"))
    answer.run()
    with pytest.raises(EngineDied, match="it died"):
        list(answer.stream)


def test_closing_the_answer_cancels_the_request() -> None:
    cancelled = threading.Event()
    answer = guide.CheckedAnswer(
        Stream(cancelled.set), TOPICS, guide.GuideQuestion("What is GGUF?")
    )
    answer.stream.close()
    assert cancelled.is_set()
