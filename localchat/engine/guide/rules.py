"""Rules that decide whether the guide's answer is shown, replaced, or needs more text.

A model of the guide's size sometimes answers a neighboring topic. Each rule looks at the text so far, and the
first rule of `RULES` with a verdict decides.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from localchat.engine.guide.sums import SUM, holds
from localchat.engine.guide.topics import Topics, answer_key
from localchat.engine.guide.updates import recent_answer

if TYPE_CHECKING:
    import numpy as np


class Thresholds(NamedTuple):
    """Probabilities at which the rules decide. Measured on 300 questions in commit 72cecf98."""

    likely: float = 0.25
    """Below it, an answer may be off-topic."""
    possible: float = 0.02
    """Minimum for an answer that is certain, or that has the most probable topic."""
    sure: float = 0.6
    """Minimum for the fixed answer of a topic to replace the guide's answer."""
    own_question: float = 0.02
    """Minimum for the question that the guide answered to be offered first."""
    offered_together: float = 0.08
    """If all offered questions together are less probable, none is offered."""
    refused_task: float = 0.5
    """Minimum for a refusal to replace an answer that repeats the question."""
    off_topic: float = 0.5
    """Refusal probability above which a question counts as off-topic."""
    answerable: float = 0.1
    """Refusal probability below which a refusal may be replaced."""
    stands_alone: float = 0.95
    """Above it, a question such as a greeting does not depend on the previous one."""


THRESHOLDS: Final = Thresholds()
OFFERED: Final = 3
"""Questions to offer when no topic is sure."""
UNKNOWN: Final = "I do not know that."
"""Start of the answer that names a real model."""
OFFER: Final = (
    f"{UNKNOWN} Did you mean one of these? Ask it in these words, or send its number next "
    "(`localchat -c NUMBER` from the shell)."
)
REFUSALS: Final = (UNKNOWN, "I cannot", "I am sorry", "I did not understand")
_NO_TEXT: Final = "I cannot work on texts"
_NO_SUM: Final = "I cannot calculate that"
_NO_TASK: Final = "I cannot write texts or code"
_ABSENT: Final = "localchat has no"
"""Start of answers that differ only in their later words."""
MAX_QUESTION_CHARACTERS: Final = 200
"""Anything longer is a text with a task, which the guide refuses."""
_LAST_LATIN: Final = "\u024f"
"""Last Latin letter. The classifier saw too little text in other scripts."""
_HINT_CHARACTERS: Final = 6
"""Characters that distinguish "I speak English only" from other answers."""
_QUESTION_BREAK: Final = re.compile(r"[?.;!]\s+(?:and )?|,? and (?=how|wh|can|do|is|are)")
"""Boundary between two questions in one message."""


class GuideQuestion(NamedTuple):
    """A question whose answer is checked."""

    text: str
    previous: str = ""
    """The question that this one depends on, if any."""
    earlier: str = ""
    """All earlier questions, separated by NUL."""

    @property
    def is_text(self) -> bool:
        """Whether it is a text with a task, which the classifier cannot judge."""
        return len(self.text) > MAX_QUESTION_CHARACTERS or "\n" in self.text

    @property
    def user_text(self) -> str:
        """Everything the user wrote."""
        return self.text + "\0" + self.earlier


class Certainty(Enum):
    """Certainty of the guide, by the log probabilities of its first tokens."""

    LOW = 0
    PENDING = 1
    """Too few tokens so far."""
    HIGH = 2


@dataclass(frozen=True, slots=True)
class PartialAnswer:
    """The text of an answer so far, with everything the rules look at."""

    topics: Topics
    probabilities: "np.ndarray"
    """Probability of each topic of `topics` for the question."""
    question: GuideQuestion
    text: str
    complete: bool = True
    """Whether the text suffices for a final verdict."""
    certainty: Certainty = Certainty.LOW


@dataclass(frozen=True, slots=True)
class Show:
    """Show the answer."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Decide after more text."""


@dataclass(frozen=True, slots=True)
class Replace:
    """Show this text instead of the answer."""

    text: str


Verdict = Show | Wait | Replace


def judge(partial: PartialAnswer) -> Verdict:
    """Return the verdict of the first rule that has one."""
    for rule in RULES:
        verdict = rule(partial)
        if verdict is not None:
            return verdict
    raise AssertionError("the last rule always decides")


def recent_feature(partial: PartialAnswer) -> Verdict | None:
    """Answer a question about a feature that the guide was not trained on."""
    if partial.question.is_text:
        return None
    answer = recent_answer(partial.question.text)
    if answer:
        return Replace(answer)
    return None


def refusal(partial: PartialAnswer) -> Verdict | None:
    """Replace a refusal if a topic is sure, or if there was no text to refuse."""
    if not partial.text.startswith(REFUSALS):
        return None
    if partial.question.is_text:
        return Show()
    if _refused(partial.topics, partial.probabilities) >= THRESHOLDS.answerable:
        return Show()
    if answer := sure_answer(partial):
        return Replace(answer)
    if partial.text.startswith(_NO_TEXT):
        return Replace(offer(partial.topics, partial.probabilities))
    if not partial.complete and _NO_TEXT.startswith(partial.text):
        return Wait()
    return Show()


def text_task(partial: PartialAnswer) -> Verdict | None:
    """Refuse a task on a text unless the answer starts like one of the guide's.

    Any other answer to a text would repeat a part of it.
    """
    if not partial.question.is_text:
        return None
    if not partial.complete:
        return Wait()
    key = answer_key(partial.text)
    if any(topic.startswith(key) for topic in partial.topics.keys):
        return Show()
    if partial.text.startswith(tuple(partial.topics.languages)):
        return Show()
    return Replace(partial.topics.answer_starting(_NO_TASK))


def quoted_text(partial: PartialAnswer) -> Verdict | None:
    """Show an answer that quotes the user, unless the question is a task to refuse."""
    quote = partial.text.strip("> \n")
    question = partial.question
    if not partial.complete or quote == question.text or quote not in question.user_text:
        return None
    if quote in question.text and (answer := task_refusal(partial)):
        return Replace(answer)
    return Show()


def other_language(partial: PartialAnswer) -> Verdict | None:
    """Cut an answer in another language after "I speak English only".

    Half of the longer answers were wrong, such as "remove" for "download".
    """
    for line in partial.topics.languages:
        if partial.text.startswith(line):
            hint = partial.text[len(line) :].strip()[:_HINT_CHARACTERS]
            if not partial.complete and len(hint) < _HINT_CHARACTERS:
                return Wait()
            if not partial.topics.english.startswith(hint):
                return Replace(f"{line}\n\n{partial.topics.english}")
            return None
    return None


def ambiguous_start(partial: PartialAnswer) -> Verdict | None:
    """Wait while the text may become a quotation, a refusal, a language hint or a sum."""
    if partial.complete:
        return None
    starts = (*REFUSALS, _ABSENT, *partial.topics.languages)
    may_quote = partial.text.lstrip("> ") in partial.question.user_text
    if may_quote or any(start.startswith(partial.text) for start in starts):
        return Wait()
    if partial.text.startswith(_ABSENT) or SUM.match(partial.text):
        return Wait()
    return None


def wrong_sum(partial: PartialAnswer) -> Verdict | None:
    """Replace a sum that is wrong or uses numbers that the user did not give."""
    if holds(partial.question.user_text, partial.text):
        return None
    return Replace(partial.topics.answer_starting(_NO_SUM))


def other_script(partial: PartialAnswer) -> Verdict | None:
    """Show answers to questions in another script, which the classifier cannot judge."""
    if max(partial.question.text) > _LAST_LATIN:
        return Show()
    return None


def unlikely_topic(partial: PartialAnswer) -> Verdict:
    """Replace an answer whose topic is neither likely nor the most probable one."""
    topics = partial.topics
    key = answer_key(partial.text)
    pairs = zip(topics.keys, map(float, partial.probabilities), strict=True)
    matches = {name: probability for name, probability in pairs if name.startswith(key)}
    if not matches and partial.question.previous:
        # Only the previous question explains such an answer, and the classifier has no topic for it.
        return Show()
    probability = sum(matches.values())
    if probability >= THRESHOLDS.likely:
        if partial.complete or min(matches.values()) >= THRESHOLDS.likely:
            return Show()
        return Wait()
    best = int(partial.probabilities.argmax())
    if topics.keys[best] in matches and partial.probabilities[best] >= THRESHOLDS.possible:
        # The guide and the classifier agree on the topic.
        return Show() if partial.complete or len(matches) == 1 else Wait()
    if answer := sure_answer(partial):
        return Replace(answer)
    if partial.certainty is Certainty.HIGH and probability >= THRESHOLDS.possible:
        return Show() if partial.complete else Wait()
    if partial.complete or (partial.certainty is Certainty.LOW and not partial.question.previous):
        likeliest = max(matches, key=matches.__getitem__, default="")
        return Replace(offer(topics, partial.probabilities, likeliest))
    return Wait()


RULES: Final[tuple[Callable[[PartialAnswer], Verdict | None], ...]] = (
    recent_feature,
    refusal,
    text_task,
    quoted_text,
    other_language,
    ambiguous_start,
    wrong_sum,
    other_script,
    unlikely_topic,
)


def topic_probabilities(topics: Topics, question: GuideQuestion) -> "np.ndarray":
    """Return the probability of each topic, or zeros for a text with a task.

    If a message has two questions, each topic gets the larger probability.
    """
    import numpy as np  # takes 60 ms, while the model loads

    if question.is_text:
        return np.zeros(len(topics.keys))
    if question.previous:
        alone = topics.probabilities(question.text)
        if alone.max() >= THRESHOLDS.stands_alone:
            return alone
    texts = [question.text]
    parts = [part for part in _QUESTION_BREAK.split(question.text) if len(part.split()) > 1]
    if len(parts) > 1:
        texts += parts
    rows = [topics.probabilities(text, question.previous) for text in texts]
    return np.asarray(np.stack(rows).max(0))


def sure_answer(partial: PartialAnswer) -> str:
    """Return the fixed answer of a topic that is sure, or an empty string."""
    best = int(partial.probabilities.argmax())
    if partial.probabilities[best] >= THRESHOLDS.sure:
        return partial.topics.answers[best]
    return ""


def task_refusal(partial: PartialAnswer) -> str:
    """Return the most probable refusal if refusing is likelier than not, or an empty string."""
    rows = zip(
        map(float, partial.probabilities), partial.topics.keys, partial.topics.answers, strict=True
    )
    refusals = [(probability, text) for probability, key, text in rows if key.startswith(REFUSALS)]
    if sum(probability for probability, _ in refusals) >= THRESHOLDS.refused_task:
        return max(refusals)[1]
    return ""


def offer(topics: Topics, probabilities: "np.ndarray", answered: str = "") -> str:
    """Return an offer of the most probable questions, or "I do not know that".

    answered: key of the topic that the guide answered, which is offered first if it is possible.
    """
    rows = zip(topics.keys, topics.questions, map(float, probabilities), strict=True)
    questions = [
        (key == answered and probability >= THRESHOLDS.own_question, probability, text)
        for key, text, probability in rows
        if text
    ]
    questions = sorted(questions, reverse=True)[:OFFERED]
    refused = _refused(topics, probabilities)
    together = sum(probability for _, probability, _ in questions)
    if refused >= THRESHOLDS.off_topic or together < THRESHOLDS.offered_together:
        return topics.answer_starting(UNKNOWN)
    lines = [f"{number}. {text}" for number, (_, _, text) in enumerate(questions, 1)]
    return "\n".join((OFFER, "", *lines))


def _refused(topics: Topics, probabilities: "np.ndarray") -> float:
    """Return the probability that the question should be refused."""
    pairs = zip(topics.keys, map(float, probabilities), strict=True)
    return sum(probability for key, probability in pairs if key.startswith(REFUSALS))
