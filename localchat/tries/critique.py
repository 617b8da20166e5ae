"""Let a model review its answer, and keep the first answer unless a corrected one wins a comparison.

`critique` decides and sends nothing: each front end sends its questions and returns the replies.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from localchat.engine.request import Grammar, Message
from localchat.errors import UsageError
from localchat.tries import judge

_GUIDE: Final = "guide"


class JudgeQuestion(NamedTuple):
    """A question to the model about its own answers."""

    purpose: str
    """A phrase for the progress line."""
    messages: tuple[Message, ...]
    grammar: Grammar | None
    max_tokens: int | None = judge.JUDGE_TOKENS
    greedy: bool = True
    """Sample the reply at temperature 0."""


@dataclass(frozen=True, slots=True)
class Critique:
    """Outcome of a review."""

    first: str
    faults: tuple[str, ...] = ()
    second: str | None = None
    """The corrected answer; None without one that is complete."""
    replaced: bool = False
    """The second answer won the comparison."""
    judged: bool = True
    """The model came to a verdict on the first answer."""

    @property
    def outcome(self) -> str:
        """Return the outcome in a few words."""
        if not self.judged:
            return "no verdict, so the first answer was kept"
        if not self.faults:
            return "no fault found"
        count = f"{len(self.faults)} fault{'s' * (len(self.faults) > 1)} found"
        if self.replaced:
            return f"{count}, answer corrected"
        if self.second is None:
            return f"{count}, no complete correction, so the first answer was kept"
        return f"{count}, the correction was not better, so the first answer was kept"

    def as_json(self) -> dict[str, Any]:
        """Return the fields of reports over the endpoint and of `--json`."""
        return {
            "method": "critique",
            "faults": list(self.faults),
            "mended": self.replaced,
            "first": self.first,
            "second": self.second,
        }


def critique(
    conversation: Sequence[Message], text: str, grammar: Grammar | None, max_tokens: int | None
) -> Generator[JudgeQuestion, str | None, Critique]:
    """Yield the questions of a review and return its outcome.

    A reply is whole; None stands for one that did not end by itself. `grammar`, `max_tokens`:
    of the reviewed request."""
    asked = judge.fault_messages(conversation, text)
    verdict = yield JudgeQuestion("judging the answer", asked, judge.FAULTS_GRAMMAR)
    faults = None if verdict is None else judge.found_faults(verdict)
    if not faults:
        return Critique(text, judged=faults is not None)
    asked = judge.mending_messages(conversation, text, faults)
    second = yield JudgeQuestion("correcting the answer", asked, grammar, max_tokens, greedy=False)
    if second is None or not second.strip():
        return Critique(text, tuple(faults))
    is_better = second.strip() != text.strip()
    # Small models prefer a place in the list. The correction must win in both.
    for index in (1, 0) if is_better else ():
        answers = [text, second] if index else [second, text]
        asked = judge.pick_messages(conversation, answers)
        reply = yield JudgeQuestion("comparing both answers", asked, judge.pick_grammar(2))
        if reply is None or judge.picked(reply, 2) != index:
            is_better = False
            break
    return Critique(text, tuple(faults), second, replaced=is_better)


def refuse_guide(model: str, feature: str) -> None:
    """Raise UsageError if the built-in guide would have to judge answers. `model`: its name."""
    if model == _GUIDE:
        raise UsageError(
            f"{feature}: the built-in guide cannot judge answers",
            hint="choose another model with -m MODEL; localchat list shows yours",
        )
