"""Engine of the built-in guide: checks that the answer is about the question before its first words are shown.

A model of its size answers now and then about a neighbouring topic. Where the classifier of topics
(guide_topics.py) finds its topic all but impossible, the answer of a topic that it is sure of is given
instead, or, if there is none, the guide says that it does not know.
"""

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from localchat.engine.events import Done, Event, Finished, Text
from localchat.engine.guide_topics import HELD, Topics, answer_key
from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest, Messages
from localchat.engine.stream import Stream
from localchat.errors import LocalchatError

if TYPE_CHECKING:
    import numpy as np

UNLIKELY: Final = 0.01
"""Below it an answer is beside the question. Of 151 wrong answers to 1,408 questions of strangers it finds 102,
and it loses 26 right ones; at 0.02 it finds 111 and loses 35."""
SURE: Final = 0.8
UNKNOWN: Final = "I do not know that."
"""How the answer begins that names a real model."""
_REFUSALS: Final = (UNKNOWN, "I cannot", "I am sorry", "I did not understand")
_ABSENT: Final = "localchat has no"
"""The beginning of answers that are told apart late."""
_LONGEST: Final = 200
"""Characters of a question; what is longer is a text with a task, which the guide refuses."""
_LATIN: Final = "\u024f"
"""The last Latin letter; what the classifier knows of other scripts is too little."""
_TELLING: Final = 6
"""Characters that tell "I speak English only" from other answers."""
_ENOUGH_TOKENS: Final = 200
_LEANS: Final = re.compile(
    r"\b(it|its|that|this|these|those|them|they|one|ones|there|then|and|same|again|else|also|why|more)\b"
)
"""Words of a question that may lean on the one before it."""


class GuideEngine(LocalEngine):
    """A LocalEngine of the guide's file and the classifier beside it (`topics.npz`)."""

    def __init__(self, options: EngineOptions, notify: Callable[[str], None]) -> None:
        super().__init__(options, notify=notify)
        self._topics = Topics(topics_file(options.model))

    def generate(self, request: GenerateRequest) -> Stream:
        question = checked_question(request)
        if not question:
            return super().generate(request)
        answer = CheckedAnswer(super().generate(request), self._topics, question)
        threading.Thread(target=answer.run, name="guide", daemon=True).start()
        return answer.stream


def topics_file(model: Path) -> Path:
    """Where the classifier of a guide's file lies."""
    return model.with_name("topics.npz")


def checked_question(request: GenerateRequest) -> str:
    """The question whose answer is checked; empty where the classifier cannot judge it: a request that binds
    the answer, a long text, a question that leans on an earlier one.
    """
    prompt = request.prompt
    if not isinstance(prompt, Messages) or prompt.tools or prompt.continue_last:
        return ""
    bound = request.grammar or request.stop or request.logprobs is not None or request.ignore_eos
    biased = request.sampling.logit_bias or request.sampling.text_bias
    few = request.max_tokens is not None and request.max_tokens < _ENOUGH_TOKENS
    if bound or biased or few or request.n > 1 or request.prompt_logprobs is not None:
        return ""
    asked = [message.content for message in prompt.messages if message.role == "user"]
    question = asked[-1].strip() if asked else ""
    if len(question) > _LONGEST or "\n" in question:
        return ""
    leans = len(question.split()) < 3 or _LEANS.search(question.lower())
    return "" if len(asked) > 1 and leans else question


def checked_answer(
    topics: Topics, probabilities: "np.ndarray", question: str, answer: str, *, whole: bool = True
) -> str | None:
    """What to say instead of an answer that begins so; empty: it is about the question, or repeats a part of
    it, or refuses. None: its next words will tell, if it is not `whole` yet.

    Half of the answers to other languages that go beyond "I speak English only" were wrong, among them "remove"
    for "download", so all of them say that.
    """
    if answer.startswith(_REFUSALS) or (whole and answer.strip() in question):
        return ""
    if line := next((line for line in topics.languages if answer.startswith(line)), ""):
        rest = answer[len(line) :].strip()[:_TELLING]
        if not whole and len(rest) < _TELLING:
            return None
        if not topics.english.startswith(rest):
            return f"{line}\n\n{topics.english}"
    beginnings = (*_REFUSALS, _ABSENT, *topics.languages)
    waits = answer in question or any(text.startswith(answer) for text in beginnings)
    if not whole and (waits or answer.startswith(_ABSENT)):
        return None
    if max(question) > _LATIN:
        return ""
    key = answer_key(answer)
    pairs = zip(topics.keys, probabilities, strict=True)
    likely = [probability for name, probability in pairs if name.startswith(key)]
    if sum(likely) >= UNLIKELY:
        return "" if whole or min(likely) >= UNLIKELY else None
    best = int(probabilities.argmax())
    if probabilities[best] >= SURE and topics.answers[best]:
        return topics.answers[best]
    return next(text for text in topics.answers if text.startswith(UNKNOWN))


class CheckedAnswer:
    """One answer, whose first words wait until they tell its topic."""

    def __init__(self, inner: Stream, topics: Topics, question: str) -> None:
        self._inner, self._topics, self._question = inner, topics, question
        self.stream = Stream(inner.close)
        self._held: list[Event] = []
        self._text = ""
        self._judged = self._replaced = False

    def run(self) -> None:
        """Pass the events on; every failure ends the stream."""
        try:
            probabilities = self._topics.probabilities(self._question)  # while the model reads
            for event in self._inner:
                self._pass(event, probabilities)
        except LocalchatError as problem:
            self.stream.put(problem)
        except Exception as problem:  # noqa: BLE001 - the request would wait for ever
            self.stream.put(LocalchatError(f"the guide's answer could not be checked: {problem!r}"))

    def _pass(self, event: Event, probabilities: "np.ndarray") -> None:
        if self._replaced:
            if isinstance(event, Done):
                self.stream.put(event)
            return
        if self._judged or not isinstance(event, Text | Finished):
            self.stream.put(event)
            return
        self._held.append(event)
        self._text += event.text if isinstance(event, Text) else ""
        whole = len(self._text) >= HELD or isinstance(event, Finished)
        other = checked_answer(self._topics, probabilities, self._question, self._text, whole=whole)
        if other is not None:
            self._judged = True
            self._replaced = bool(other)
            self.stream.put(*([Text(0, other), Finished(0, "stop")] if other else self._held))
