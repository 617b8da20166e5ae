"""The guide's engine: what is checked, what is said instead, and the stream of an answer that is checked."""

import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

import localchat
from localchat.engine import guide
from localchat.engine.events import (
    Accepted,
    Done,
    Event,
    Finished,
    Speculation,
    Text,
    Timings,
    Usage,
)
from localchat.engine.guide_topics import Topics, answer_key
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


def said(question: str, answer: str) -> str:
    """What is said instead of a whole answer."""
    other = guide.checked_answer(TOPICS, TOPICS.probabilities(question), question, answer)
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


def test_a_refusal_stays() -> None:
    assert said("what is gguf?", "I cannot work on texts: I am a small guide") == ""


def test_an_answer_with_a_word_of_the_question_stays() -> None:
    assert said("stop generating when it writes END", 'Add `--stop "END"`.') == ""
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
    probabilities, words = TOPICS.probabilities(question), answer.split(" ")
    for count in range(1, len(words)):
        begun = " ".join(words[:count])
        if guide.checked_answer(TOPICS, probabilities, question, begun, whole=False) is not None:
            return count
    return len(words)


def test_few_words_wait() -> None:
    assert words_held("what is gguf?", GGUF) <= 4
    assert words_held("what is gguf?", QUIT) <= 4
    assert (
        words_held("what is the capital of France?", "I do not know that. I am a small guide") <= 5
    )


def asked(*contents: str, **changes: object) -> GenerateRequest:
    """A conversation whose odd messages are the user's."""
    messages = tuple(
        Message("assistant" if at % 2 else "user", text) for at, text in enumerate(contents)
    )
    return msgspec.structs.replace(GenerateRequest(Messages(messages)), **changes)


@pytest.mark.parametrize(
    ("request_", "question"),
    [
        (asked("What is GGUF?"), "What is GGUF?"),
        (asked("What is GGUF?", "A format.", "How do I quit?"), "How do I quit?"),
        (asked("What is GGUF?", "A format.", "and how do I open it?"), ""),
        (asked("What is GGUF?", "A format.", "why?"), ""),
        (asked("x" * 300), ""),
        (asked("Sum up:\na text"), ""),
        (asked("怎么退出"), "怎么退出"),
        (asked("hi", max_tokens=5), ""),
        (asked("hi", stop=("x",)), ""),
        (asked("hi", n=2), ""),
        (asked("hi", grammar=Grammar("regex", "yes|no")), ""),
        (asked("hi", sampling=Sampling(logit_bias={1: 5.0})), ""),
        (GenerateRequest(TextPrompt("hi")), ""),
    ],
)
def test_what_the_classifier_can_judge_is_checked(request_: GenerateRequest, question: str) -> None:
    assert guide.checked_question(request_) == question


def shown(question: str, *events: Event) -> Sequence[Event]:
    """What a user sees of these events of the model."""
    inner = Stream(lambda: None)
    answer = guide.CheckedAnswer(inner, TOPICS, question)
    inner.put(*events)
    answer.run()
    return list(answer.stream)


def test_a_right_answer_passes_as_it_comes() -> None:
    events = (Accepted(5, 100, 1), Text(0, GGUF[:50]), Text(0, GGUF[50:]), Text(0, "more"))
    end = (Finished(0, "stop"), DONE)
    assert shown("What is GGUF?", *events, *end) == [*events, *end]


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


def test_a_short_answer_is_checked_at_its_end() -> None:
    events = shown("What is GGUF?", Text(0, "`localchat pull x`"), Finished(0, "stop"), DONE)
    assert "".join(event.text for event in events if isinstance(event, Text)).startswith("GGUF")


def test_a_failure_reaches_the_user() -> None:
    inner = Stream(lambda: None)
    answer = guide.CheckedAnswer(inner, TOPICS, "What is GGUF?")
    inner.put(Text(0, GGUF), EngineDied("it died"))
    answer.run()
    with pytest.raises(EngineDied, match="it died"):
        list(answer.stream)


def test_closing_the_answer_cancels_the_request() -> None:
    cancelled = threading.Event()
    answer = guide.CheckedAnswer(Stream(cancelled.set), TOPICS, "What is GGUF?")
    answer.stream.close()
    assert cancelled.is_set()
