"""Engine of the built-in guide: checks each answer before its first words are shown.

The rules (rules.py) compare the topic of an answer with the topics that a classifier (topics.py) finds in the
question. Once an answer differs from the fixed answer of its topic, the rest of the fixed answer follows.
"""

import re
import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from localchat.engine.events import Done, Finished, Text
from localchat.engine.guide.phrases import PhraseReplacement
from localchat.engine.guide.rules import (
    MAX_QUESTION_CHARACTERS,
    OFFER,
    Certainty,
    GuideQuestion,
    PartialAnswer,
    Replace,
    Wait,
    judge,
    topic_probabilities,
)
from localchat.engine.guide.topics import KEY_CHARACTERS, Topics, answer_key, topics_file
from localchat.engine.guide.updates import read_updates
from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest, Message, Messages
from localchat.engine.stream import Stream
from localchat.errors import LocalchatError

if TYPE_CHECKING:
    import numpy as np

_FIRST_TOKENS: Final = 16
_CERTAIN_LOGPROB: Final = -0.003
"""Minimum sum of the first tokens' log probabilities if the guide is certain."""
_PICK: Final = re.compile(r"\W*(\d)\W*")
_REFERENCE: Final = re.compile(
    r"\b(it|its|that|this|these|those|them|they|one|ones|there|then|and|same|again|else|also|too|why|more)\b"
    r"|^(with|without|even|only|for|in|on|from|as)\b"
)
"""Words that may refer to the previous question."""


class GuideEngine(LocalEngine):
    """A LocalEngine of the guide's file and the classifier beside it (`topics.npz`)."""

    def __init__(
        self,
        options: EngineOptions,
        notify: Callable[[str], None],
        phrases: Mapping[str, Callable[[], str]] = MappingProxyType({}),
    ) -> None:
        """phrases: replacements in answers, such as the model that suits this machine.

        Called on a thread when an answer has the phrase."""
        super().__init__(options, notify=notify)
        self._topics = Topics(topics_file(options.model))
        # Corrections come first: the others look for phrases of corrected answers.
        self._phrases: dict[str, Callable[[], str]] = {
            phrase: partial(str, correction)
            for phrase, correction in read_updates().phrases.items()
        }
        self._phrases.update(phrases)

    def generate(self, request: GenerateRequest) -> Stream:
        request = picked(request)
        question = checked_question(request)
        if question is None:
            return super().generate(request)
        inner = super().generate(replace(request, logprobs=0))
        limit = request.max_tokens

        def cut(text: str) -> str:
            if limit is None:
                return text
            tokens = self.tokenize(text)
            return text if len(tokens) <= limit else self.detokenize(tokens[:limit])

        answer = CheckedAnswer(inner, self._topics, question, request.n, cut, self._phrases)
        threading.Thread(target=answer.run, name="guide", daemon=True).start()
        return answer.stream


def checked_question(request: GenerateRequest) -> GuideQuestion | None:
    """Return the question whose answer is checked, or None if the request constrains the answer."""
    prompt = request.prompt
    if not isinstance(prompt, Messages) or prompt.tools or prompt.continue_last:
        return None
    if request.grammar or request.stop or request.ignore_eos:
        return None
    if request.logprobs is not None or request.prompt_logprobs is not None:
        return None
    if request.sampling.logit_bias or request.sampling.text_bias:
        return None
    questions = [message.content.strip() for message in prompt.messages if message.role == "user"]
    if not questions or not questions[-1]:
        return None
    *earlier, text = questions
    question = GuideQuestion(text)
    if question.is_text:
        return question
    previous = ""
    if earlier and (len(text.split()) < 3 or _REFERENCE.search(text.lower())):
        previous = earlier[-1][:MAX_QUESTION_CHARACTERS]
    return GuideQuestion(text, previous, "\0".join(earlier))


def picked(request: GenerateRequest) -> GenerateRequest:
    """Replace a last message that is the number of an offered question by that question.

    The question stands alone, so only the instructions are sent before it. Other requests stay as they are.
    """
    prompt = request.prompt
    if not isinstance(prompt, Messages) or len(prompt.messages) < 2:
        return request
    offer, last = prompt.messages[-2:]
    number = _PICK.fullmatch(last.content)
    if last.role != "user" or number is None or not offer.content.startswith(OFFER):
        return request
    question = re.search(rf"^{number[1]}\. (.+)$", offer.content, re.M)
    if question is None:
        return request
    system = [message for message in prompt.messages if message.role == "system"]
    messages = (*system, Message("user", question[1]))
    return replace(request, prompt=replace(prompt, messages=messages))


class CheckedAnswer:
    """The answer to one request. Each choice is checked on its own."""

    def __init__(
        self,
        inner: Stream,
        topics: Topics,
        question: GuideQuestion,
        choices: int = 1,
        cut: Callable[[str], str] = str,
        phrases: Mapping[str, Callable[[], str]] = MappingProxyType({}),
    ) -> None:
        """cut: truncates a text to the token limit of the request. phrases: see GuideEngine."""
        self._inner = inner
        self._topics = topics
        self._question = question
        self.stream = Stream(inner.close)
        self._choices = [
            _CheckedChoice(number, self.stream, topics, question, cut, phrases)
            for number in range(choices)
        ]

    def run(self) -> None:
        """Forward the events. Every failure ends the stream."""
        try:
            # The classifier works while the model reads the prompt.
            probabilities = topic_probabilities(self._topics, self._question)
            for event in self._inner:
                if isinstance(event, Text | Finished):
                    self._choices[event.choice].receive(event, probabilities)
                elif isinstance(event, Done) or not all(choice.ended for choice in self._choices):
                    self.stream.put(event)
        except LocalchatError as problem:
            self.stream.put(problem)
        except Exception as problem:  # noqa: BLE001 - otherwise the request would wait forever
            self.stream.put(LocalchatError(f"the guide's answer could not be checked: {problem!r}"))


class _CheckedChoice:
    """A choice. Its first words are buffered until they show the topic."""

    def __init__(
        self,
        number: int,
        stream: Stream,
        topics: Topics,
        question: GuideQuestion,
        cut: Callable[[str], str],
        phrases: Mapping[str, Callable[[], str]],
    ) -> None:
        self._phrases = phrases
        self._replacement: PhraseReplacement | None = None
        self._number = number
        self._stream = stream
        self._cut = cut
        self._topics = topics
        self._question = question
        self._pending: list[Text | Finished] = []
        self._logprobs: list[float] = []
        self._text = ""
        self._fixed_answer: str | None = None
        """Fixed answer of the topic, empty if it has none. None until the topic is known."""
        self._judged = False
        self.ended = False
        """Whether the choice ended with a fixed answer, so that later events are dropped."""
        self._first_answer = ""
        """A complete answer that was shown, while the text after it is judged."""

    def receive(self, event: Text | Finished, probabilities: "np.ndarray") -> None:
        """Forward an event, now or once the answer is judged."""
        if self.ended:
            return
        if isinstance(event, Text) and event.logprobs:
            self._logprobs += [token.logprob for token in event.logprobs]
            event = Text(event.choice, event.text)
        if self._judged:
            self._follow(event, probabilities)
        else:
            self._judge(event, probabilities)

    def _judge(self, event: Text | Finished, probabilities: "np.ndarray") -> None:
        """Buffer an event until the text so far shows whether the answer is shown."""
        self._pending.append(event)
        if isinstance(event, Text):
            self._text += event.text
        text = self._text.lstrip()
        complete = isinstance(event, Finished) or len(text) >= KEY_CHARACTERS
        certainty = self._certainty(complete=complete)
        verdict = judge(
            PartialAnswer(self._topics, probabilities, self._question, text, complete, certainty)
        )
        if isinstance(verdict, Wait):
            return
        self._judged = True
        if self._first_answer:
            # A second answer follows only if it is neither wrong nor a repetition of the first.
            key = answer_key(text)
            repeated = key and answer_key(self._first_answer).startswith(key)
            if repeated or isinstance(verdict, Replace):
                self._end("")
                return
        elif isinstance(verdict, Replace):
            self._end(verdict.text)
            return
        pending = self._pending
        self._pending = []
        self._text = ""
        for earlier in pending:
            self.receive(earlier, probabilities)

    def _certainty(self, *, complete: bool) -> Certainty:
        """Return how certain the guide is of its first answer."""
        logprobs = self._logprobs[:_FIRST_TOKENS]
        if not logprobs or self._first_answer or sum(logprobs) < _CERTAIN_LOGPROB:
            return Certainty.LOW
        if complete or len(logprobs) == _FIRST_TOKENS:
            return Certainty.HIGH
        return Certainty.PENDING

    def _follow(self, event: Text | Finished, probabilities: "np.ndarray") -> None:
        """Forward text that agrees with the fixed answer; at the first difference, send its rest.

        Text after a complete answer is the answer to a second question, if the message has one.
        """
        shown = self._text
        finished = isinstance(event, Finished)
        if isinstance(event, Text):
            self._text += event.text
        if self._fixed_answer is None and (finished or len(self._text) >= KEY_CHARACTERS):
            self._fixed_answer = self._topics.answer(answer_key(self._text))
        expected = self._fixed_answer or self._text
        if isinstance(event, Finished):
            if event.reason == "stop" and expected.startswith(shown):
                self._end(expected[len(shown) :], shown)
            else:
                self._send(event)
        elif expected.startswith(self._text) or not expected.startswith(shown):
            self._send(event)
        elif self._text.startswith(expected):
            second = self._text[len(expected) :]
            self._put(expected[len(shown) :])
            self._text = ""
            self._fixed_answer = None
            self._judged = False
            self._first_answer = expected
            self._judge(Text(self._number, second), probabilities)
        else:
            self._end(expected[len(shown) :], shown)

    def _put(self, text: str) -> None:
        if text:
            self._send(Text(self._number, text))

    def _end(self, text: str, shown: str = "") -> None:
        """End the answer with this text after the shown part, whatever the model still generates."""
        self.ended = True
        answer = shown + text
        truncated = self._cut(answer)
        self._put(truncated[len(shown) :])
        if truncated == answer:
            self._send(Finished(self._number, "stop"))
        else:
            self._send(Finished(self._number, "length", limit="max_tokens"))

    def _send(self, event: Text | Finished) -> None:
        """Put an event into the stream, with phrases replaced."""
        if self._replacement is None:
            self._replacement = PhraseReplacement(self._phrases)
        if isinstance(event, Text):
            text = self._replacement.feed(event.text)
        else:
            text = self._replacement.flush()
        if text:
            self._stream.put(Text(self._number, text))
        if isinstance(event, Finished):
            self._stream.put(event)
