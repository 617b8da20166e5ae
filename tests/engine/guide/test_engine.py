"""The guide's engine: which requests it checks, and the stream of a checked answer."""

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
from localchat.engine.guide import engine, rules
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


OFFERED = f"{rules.OFFER}\n\n1. What is GGUF?\n2. How do I quit?"


@pytest.mark.parametrize(
    ("last", "question"),
    [("1", "What is GGUF?"), (" 2. ", "How do I quit?"), ("(1)", "What is GGUF?")],
)
def test_a_number_picks_an_offered_question_which_stands_alone(last: str, question: str) -> None:
    request = asked("help me with the file", OFFERED, last)
    assert isinstance(request.prompt, Messages)
    told = Messages((Message("system", "Be brief."), *request.prompt.messages))
    chosen = engine.picked(msgspec.structs.replace(request, prompt=told)).prompt
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
    assert engine.picked(request_) is request_


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
    assert engine.checked_question(request_) == question


def shown(question: str, *events: Event) -> Sequence[Event]:
    """What a user sees of these events of the model."""
    inner = Stream(lambda: None)
    choices = 1 + max(each.choice for each in events if isinstance(each, Finished))
    answer = engine.CheckedAnswer(inner, TOPICS, rules.GuideQuestion(question), choices)
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
    monkeypatch.setattr(engine, "topic_probabilities", lambda *_: possible)
    text = text_shown("a file?", of_tokens(TABLE[:90], *logprobs), Text(0, TABLE[90:]), *END)
    assert (text == TABLE) is right


@pytest.mark.parametrize(("other", "right"), [(0.09, True), (0.11, False)])
def test_an_unlikely_answer_is_shown_if_no_other_topic_is_likelier(
    other: float, right: bool
) -> None:
    likely = np.full(len(TOPICS.keys), 1e-6)
    likely[TOPICS.keys.index(answer_key(GGUF))] = 0.1
    likely[TOPICS.keys.index(answer_key(QUIT))] = other
    partial = rules.PartialAnswer(TOPICS, likely, rules.GuideQuestion("a file?"), GGUF)
    assert (rules.judge(partial) == rules.Show()) is right


def test_log_probabilities_that_nobody_asked_for_are_not_sent() -> None:
    for event in shown(
        "What is GGUF?", of_tokens(TABLE[:90], -0.1), of_tokens(TABLE[90:], 0.0), *END
    ):
        assert not isinstance(event, Text) or not event.logprobs


def test_an_answer_at_its_limit_of_tokens_is_not_continued() -> None:
    events = (Text(0, TABLE[:90]), Finished(0, "length"), DONE)
    assert text_shown("What is GGUF?", *events) == TABLE[:90]


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
    question = rules.GuideQuestion("What is GGUF?")
    answer = engine.CheckedAnswer(inner, TOPICS, question, cut=lambda text: text[:110])
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
    answer = engine.CheckedAnswer(inner, TOPICS, rules.GuideQuestion("What is GGUF?"))
    inner.put(Text(0, GGUF), EngineDied("it died"))
    answer.run()
    with pytest.raises(EngineDied, match="it died"):
        list(answer.stream)


def test_closing_the_answer_cancels_the_request() -> None:
    cancelled = threading.Event()
    answer = engine.CheckedAnswer(
        Stream(cancelled.set), TOPICS, rules.GuideQuestion("What is GGUF?")
    )
    answer.stream.close()
    assert cancelled.is_set()
