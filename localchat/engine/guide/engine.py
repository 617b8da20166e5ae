"""Engine of the built-in guide: checks that the answer is about the question before its first words are shown.

A model of its size answers now and then about a neighbouring topic. Where the classifier of topics
(guide_topics.py) finds its topic neither likely nor the likeliest, the answer of a topic that it is sure of
is given instead, or, if there is none, the guide says that it does not know and offers the nearest questions.
A sum that does not hold is not shown. From where the words of an answer part from the table's, the table's
follow.
"""

import re
import threading
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec.structs import replace

from localchat.engine.events import Done, Finished, Text
from localchat.engine.guide.phrases import PhraseReplacement
from localchat.engine.guide.sums import SUM, holds
from localchat.engine.guide.topics import HELD, Topics, answer_key
from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest, Message, Messages
from localchat.engine.stream import Stream
from localchat.errors import LocalchatError

if TYPE_CHECKING:
    import numpy as np

LIKELY: Final = 0.25
"""Below it an answer may be beside the question (scripts/bench/LOG.md has what other values catch and lose)."""
_POSSIBLE: Final = 0.02
"""From it on an answer is shown which the guide itself is certain of, or whose topic is the likeliest."""
_CERTAIN: Final = -0.003
"""Log probability of the first tokens of such an answer, together."""
_FIRST_TOKENS: Final = 16
SURE: Final = 0.6
"""From it on the answer of another topic than the guide's is given."""
OFFERED: Final = 3
"""Questions that are offered where no topic is sure."""
_ITS_OWN: Final = 0.02
"""From it on the question that the guide answered is offered first."""
_LEAST: Final = 0.08
"""Where all topics that could be offered are less likely together, none is."""
_ALONE: Final = 0.95
"""From it on a question that may lean on the one before it stands alone, such as a greeting."""
_BEYOND: Final = 0.5
"""From it on a question is taken for one beyond the guide's subject."""
_ANSWERED: Final = 0.1
"""Below it a question that the guide refused may be answered, or offers be made."""
UNKNOWN: Final = "I do not know that."
"""How the answer begins that names a real model."""
OFFER: Final = (
    f"{UNKNOWN} Did you mean one of these? Ask it in these words, or send its number next "
    "(`localchat -c NUMBER` from the shell)."
)
_PICK: Final = re.compile(r"\W*(\d)\W*")
REFUSALS: Final = (UNKNOWN, "I cannot", "I am sorry", "I did not understand")
_NO_TEXT: Final = "I cannot work on texts"
_NO_SUM: Final = "I cannot calculate that"
_NO_TASK: Final = "I cannot write texts or code"
_ABSENT: Final = "localchat has no"
"""The beginning of answers that are told apart late."""
_LONGEST: Final = 200
"""Characters of a question; what is longer is a text with a task, which the guide refuses."""
_LATIN: Final = "\u024f"
"""The last Latin letter; what the classifier knows of other scripts is too little."""
_TELLING: Final = 6
"""Characters that tell "I speak English only" from other answers."""
_HALVES: Final = re.compile(r"[?.;!]\s+(?:and )?|,? and (?=how|wh|can|do|is|are)")
"""Between two questions in one."""
_LEANS: Final = re.compile(
    r"\b(it|its|that|this|these|those|them|they|one|ones|there|then|and|same|again|else|also|too|why|more)\b"
    r"|^(with|without|even|only|for|in|on|from|as)\b"
)
"""Words of a question that may lean on the one before it."""


class GuideEngine(LocalEngine):
    """A LocalEngine of the guide's file and the classifier beside it (`topics.npz`)."""

    def __init__(
        self,
        options: EngineOptions,
        notify: Callable[[str], None],
        phrases: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """phrases: replacements in answers, such as the model that suits this machine. Called on a thread."""
        super().__init__(options, notify=notify)
        self._topics = Topics(topics_file(options.model))
        self._phrases = cache(phrases)

    def generate(self, request: GenerateRequest) -> Stream:
        request = picked(request)
        asked = checked_question(request)
        if asked is None:
            return super().generate(request)
        inner = super().generate(replace(request, logprobs=0))
        most = request.max_tokens

        def cut(text: str) -> str:
            if most is None or len(tokens := self.tokenize(text)) <= most:
                return text
            return self.detokenize(tokens[:most])

        answer = CheckedAnswer(inner, self._topics, asked, request.n, cut, self._phrases)
        threading.Thread(target=answer.run, name="guide", daemon=True).start()
        return answer.stream


def topics_file(model: Path) -> Path:
    """Where the classifier of a guide's file lies."""
    return model.with_name("topics.npz")


class GuideQuestion(NamedTuple):
    """A question whose answer is checked; `before`: the question that it leans on, or empty; `earlier`: all
    questions before it.
    """

    question: str
    before: str = ""
    earlier: str = ""

    @property
    def is_text(self) -> bool:
        """Whether it is a text with a task, which the classifier cannot judge."""
        return len(self.question) > _LONGEST or "\n" in self.question


def checked_question(request: GenerateRequest) -> GuideQuestion | None:
    """The question whose answer is checked; None for a request that binds the answer."""
    prompt = request.prompt
    if not isinstance(prompt, Messages) or prompt.tools or prompt.continue_last:
        return None
    bound = request.grammar or request.stop or request.logprobs is not None or request.ignore_eos
    biased = request.sampling.logit_bias or request.sampling.text_bias
    if bound or biased or request.prompt_logprobs is not None:
        return None
    asked = [message.content.strip() for message in prompt.messages if message.role == "user"]
    if not asked or not asked[-1]:
        return None
    if (text := GuideQuestion(asked[-1])).is_text:
        return text
    leans = len(asked[-1].split()) < 3 or _LEANS.search(asked[-1].lower())
    before = asked[-2][:_LONGEST] if len(asked) > 1 and leans else ""
    return GuideQuestion(asked[-1], before, "\0".join(asked[:-1]))


def picked(request: GenerateRequest) -> GenerateRequest:
    """The request for an offered question, if its last message is the number of one; else as it is.

    Such a question stands alone, so nothing before it is sent but the instructions.
    """
    prompt = request.prompt
    if not isinstance(prompt, Messages) or len(prompt.messages) < 2:
        return request
    offer, last = prompt.messages[-2:]
    number = _PICK.fullmatch(last.content)
    if last.role != "user" or number is None or not offer.content.startswith(OFFER):
        return request
    chosen = re.search(rf"^{number[1]}\. (.+)$", offer.content, re.M)
    if chosen is None:
        return request
    system = [message for message in prompt.messages if message.role == "system"]
    messages = (*system, Message("user", chosen[1]))
    return replace(request, prompt=replace(prompt, messages=messages))


def likely_topics(topics: Topics, asked: GuideQuestion) -> "np.ndarray":
    """The probability of each topic; of two questions in one, the larger of both; 0 for a text."""
    halves = [half for half in _HALVES.split(asked.question) if len(half.split()) > 1]
    texts = (asked.question, *(halves if len(halves) > 1 else ()))
    import numpy as np  # 60 ms, while the model loads

    if asked.is_text:
        return np.zeros(len(topics.keys))
    if asked.before and (alone := topics.probabilities(asked.question)).max() >= _ALONE:
        return alone
    likely: np.ndarray = np.stack([topics.probabilities(text, asked.before) for text in texts]).max(
        0
    )
    return likely


def checked_answer(
    topics: Topics,
    probabilities: "np.ndarray",
    asked: GuideQuestion,
    answer: str,
    *,
    whole: bool = True,
    certain: bool | None = False,
) -> str | None:
    """What to say instead of an answer that begins so; empty: it is about the question, or repeats a part of
    it, or refuses. None: its next words will tell, if it is not `whole` yet. `certain`: the guide is, so that
    its topic need not be likely, only possible; None: it may be.

    Half of the answers to other languages that go beyond "I speak English only" were wrong, among them "remove"
    for "download", so all of them say that.
    """
    said = asked.question + "\0" + asked.earlier
    if answer.startswith(REFUSALS):
        return unrefused(topics, probabilities, asked, answer, whole=whole)
    if asked.is_text:
        return checked_beginning(topics, answer) if whole else None
    if whole and (quoted := answer.strip("> \n")) != asked.question and quoted in said:
        if quoted in asked.question:
            return task_refusal(topics, probabilities)
        return ""
    if line := next((line for line in topics.languages if answer.startswith(line)), ""):
        rest = answer[len(line) :].strip()[:_TELLING]
        if not whole and len(rest) < _TELLING:
            return None
        if not topics.english.startswith(rest):
            return f"{line}\n\n{topics.english}"
    beginnings = (*REFUSALS, _ABSENT, *topics.languages)
    waits = answer.lstrip("> ") in said or any(text.startswith(answer) for text in beginnings)
    if not whole and (waits or answer.startswith(_ABSENT) or SUM.match(answer)):
        return None
    if not holds(said, answer):
        return next(text for text in topics.answers if text.startswith(_NO_SUM))
    if max(asked.question) > _LATIN:
        return ""
    key = answer_key(answer)
    pairs = zip(topics.keys, map(float, probabilities), strict=True)
    likely = {name: probability for name, probability in pairs if name.startswith(key)}
    if not likely and asked.before:
        return ""  # an answer that only a question before it can have: no topic of the classifier
    if sum(likely.values()) >= LIKELY:
        return "" if whole or min(likely.values()) >= LIKELY else None
    best = int(probabilities.argmax())
    if topics.keys[best] in likely and probabilities[best] >= _POSSIBLE:  # both name one topic
        return "" if whole or len(likely) == 1 else None
    other = sure(topics, probabilities)
    if certain and not other and sum(likely.values()) >= _POSSIBLE:
        return "" if whole else None
    if other or whole or (certain is False and not asked.before):
        return other or offer(
            topics, probabilities, max(likely, key=likely.__getitem__, default="")
        )
    return None


def checked_beginning(topics: Topics, answer: str) -> str:
    """What to say instead of an answer to a text; empty: it begins as one of the guide's does. What a small
    guide makes of a text otherwise is a piece of it."""
    key = answer_key(answer)
    if any(name.startswith(key) for name in topics.keys) or answer.startswith((*topics.languages,)):
        return ""
    return next(text for text in topics.answers if text.startswith(_NO_TASK))


def unrefused(
    topics: Topics, probabilities: "np.ndarray", asked: GuideQuestion, answer: str, *, whole: bool
) -> str | None:
    """What to say instead of a refusal; empty if it may be right. None: its next words will tell."""
    if asked.is_text or _refused(topics, probabilities) >= _ANSWERED:
        return ""
    if other := sure(topics, probabilities):
        return other
    if answer.startswith(_NO_TEXT):  # and there was none
        return offer(topics, probabilities, "")
    return None if not whole and _NO_TEXT.startswith(answer) else ""


def _refused(topics: Topics, probabilities: "np.ndarray") -> float:
    """How likely it is that a question is to be refused."""
    return sum(
        likely
        for name, likely in zip(topics.keys, map(float, probabilities), strict=True)
        if name.startswith(REFUSALS)
    )


def task_refusal(topics: Topics, probabilities: "np.ndarray") -> str:
    """The likeliest refusal, where a task is rather to be refused than to repeat a text; else empty."""
    rows = zip(map(float, probabilities), topics.keys, topics.answers, strict=True)
    refusals = [(likely, text) for likely, name, text in rows if name.startswith(REFUSALS)]
    if sum(likely for likely, _ in refusals) >= 0.5:
        return max(refusals)[1]
    return ""


def sure(topics: Topics, probabilities: "np.ndarray") -> str:
    """The answer of a topic that is sure, if it is always the same; else empty."""
    best = int(probabilities.argmax())
    if probabilities[best] >= SURE:
        return topics.answers[best]
    return ""


def offer(topics: Topics, probabilities: "np.ndarray", key: str) -> str:
    """The likeliest questions, the one that was answered (`key`) before all others; or that the guide does not
    know.
    """
    rows = list(zip(topics.keys, topics.questions, map(float, probabilities), strict=True))
    offered = [
        (name == key and likely >= _ITS_OWN, likely, text) for name, text, likely in rows if text
    ]
    offered = sorted(offered, reverse=True)[:OFFERED]
    if (
        _refused(topics, probabilities) >= _BEYOND
        or sum(likely for _, likely, _ in offered) < _LEAST
    ):
        return next(text for text in topics.answers if text.startswith(UNKNOWN))
    lines = [f"{at}. {text}" for at, (_, _, text) in enumerate(offered, 1)]
    return "\n".join((OFFER, "", *lines))


class CheckedAnswer:
    """The answer to one request, of which each choice is checked."""

    def __init__(
        self,
        inner: Stream,
        topics: Topics,
        asked: GuideQuestion,
        choices: int = 1,
        cut: Callable[[str], str] = str,
        phrases: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """`cut`: gives the beginning of a text that the most tokens of the request allow. `phrases`: see
        GuideEngine."""
        self._inner = inner
        self._topics = topics
        self._asked = asked
        self.stream = Stream(inner.close)
        self._choices = [
            _CheckedChoice(number, self.stream, topics, asked, cut, phrases)
            for number in range(choices)
        ]

    def run(self) -> None:
        """Pass the events on; every failure ends the stream."""
        try:
            probabilities = likely_topics(self._topics, self._asked)  # while the model reads
            for event in self._inner:
                if isinstance(event, Text | Finished):
                    self._choices[event.choice].receive(event, probabilities)
                elif isinstance(event, Done) or not all(one.replaced for one in self._choices):
                    self.stream.put(event)
        except LocalchatError as problem:
            self.stream.put(problem)
        except Exception as problem:  # noqa: BLE001 - the request would wait for ever
            self.stream.put(LocalchatError(f"the guide's answer could not be checked: {problem!r}"))


class _CheckedChoice:
    """One choice, whose first words wait until they tell its topic."""

    def __init__(
        self,
        number: int,
        stream: Stream,
        topics: Topics,
        asked: GuideQuestion,
        cut: Callable[[str], str],
        phrases: Callable[[], Mapping[str, str]],
    ) -> None:
        self._phrases = phrases
        self._replacement: PhraseReplacement | None = None
        self._number = number
        self._stream = stream
        self._cut = cut
        self._topics = topics
        self._asked = asked
        self._held: list[Text | Finished] = []
        self._logprobs: list[float] = []
        self._text = ""
        self._table: str | None = None
        """The answer in the table if its topic always has the same; None until the topic is known."""
        self._judged = self.replaced = False
        self._first = ""
        """An answer that was shown whole, while what follows it is judged."""

    def receive(self, event: Text | Finished, probabilities: "np.ndarray") -> None:
        """Pass an event on, now or once it is judged."""
        if self.replaced:
            return
        if isinstance(event, Text) and event.logprobs:
            self._logprobs += [each.logprob for each in event.logprobs]
            event = Text(event.choice, event.text)
        if self._judged:
            self._follow(event, probabilities)
        else:
            self._judge(event, probabilities)

    def _judge(self, event: Text | Finished, probabilities: "np.ndarray") -> None:
        """Hold an event back until the words so far tell whether the answer is shown."""
        self._held.append(event)
        self._text += event.text if isinstance(event, Text) else ""
        begun = self._text.lstrip()
        ends = isinstance(event, Finished)
        whole = ends or len(begun) >= HELD
        certain = self._certain(whole=whole)
        other = checked_answer(
            self._topics, probabilities, self._asked, begun, whole=whole, certain=certain
        )
        if other is None:
            return
        self._judged = True
        again = bool(self._first) and answer_key(self._first).startswith(answer_key(begun) or "\0")
        if other or again:
            self._end("" if self._first else other)
            return
        held = self._held
        self._held = []
        self._text = ""
        for each in held:
            self.receive(each, probabilities)

    def _certain(self, *, whole: bool) -> bool | None:
        """Whether the first tokens say that the guide is certain of its first answer; None: not yet."""
        first = self._logprobs[:_FIRST_TOKENS]
        if not first or self._first or sum(first) < _CERTAIN:
            return False
        return True if whole or len(first) == _FIRST_TOKENS else None

    def _follow(self, event: Text | Finished, probabilities: "np.ndarray") -> None:
        """Pass on what agrees with the table, and the rest of the table's answer where it does not.

        What comes after a whole answer is the answer to a second question, if it is about one.
        """
        shown = self._text
        ends = isinstance(event, Finished)
        self._text += "" if isinstance(event, Finished) else event.text
        if self._table is None and (ends or len(self._text) >= HELD):
            self._table = self._topics.answer(answer_key(self._text))
        table = self._table or self._text
        if isinstance(event, Finished):
            if event.reason == "stop" and table.startswith(shown):
                self._end(table[len(shown) :], shown)
            else:
                self._send(event)
        elif table.startswith(self._text) or not table.startswith(shown):
            self._send(event)
        elif self._text.startswith(table):
            second = self._text[len(table) :]
            self._put(table[len(shown) :])
            self._text = ""
            self._table = None
            self._judged = False
            self._first = table
            self._judge(Text(self._number, second), probabilities)
        else:
            self._end(table[len(shown) :], shown)

    def _put(self, text: str) -> None:
        if text:
            self._send(Text(self._number, text))

    def _end(self, text: str, shown: str = "") -> None:
        """End the answer with this text after what is shown, whatever the model still says."""
        self.replaced = True
        whole = shown + text
        kept = self._cut(whole)
        self._put(kept[len(shown) :])
        if kept == whole:
            self._send(Finished(self._number, "stop"))
        else:
            self._send(Finished(self._number, "length", limit="max_tokens"))

    def _send(self, event: Text | Finished) -> None:
        """Put an event into the stream, with phrases replaced."""
        if self._replacement is None:
            self._replacement = PhraseReplacement(self._phrases())
        text = (
            self._replacement.feed(event.text)
            if isinstance(event, Text)
            else self._replacement.flush()
        )
        if text:
            self._stream.put(Text(self._number, text))
        if isinstance(event, Finished):
            self._stream.put(event)
