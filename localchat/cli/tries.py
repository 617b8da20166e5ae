"""Asks a model about its own answers: picks the best of several tries, or finds and mends faults."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from localchat.cli.render_answer import AnswerDisplay, ReceivedAnswer, receive
from localchat.cli.resolve import Setup, request_for
from localchat.cli.streams import Terminal
from localchat.engine.events import Usage
from localchat.engine.interface import Engine
from localchat.engine.request import Grammar, Message, Messages
from localchat.errors import ContextExceeded
from localchat.tries import judge
from localchat.tries.collection import Tries


@dataclass(slots=True)
class Judge:
    """Asks the model that answered for a verdict on its answers."""

    setup: Setup
    engine: Engine
    conversation: tuple[Message, ...]
    """That was answered."""
    spent: list[Usage] = field(default_factory=list)
    """Usage of the requests so far."""

    @property
    def terminal(self) -> Terminal:
        return self.setup.terminal

    def pick(self, tries: Tries) -> None:
        """Let the model pick one of the tries. Without a verdict, the first stays, with a notice."""
        whole = sorted(tries.whole) or sorted(tries.texts)
        if len(whole) < 2:
            tries.picked = whole[0] if whole else 0
            return
        texts = [tries.texts[number] for number in whole]
        asked = judge.pick_messages(self.conversation, texts)
        verdict = self._verdict(asked, judge.pick_grammar(len(whole)), "picking the best")
        place = None if verdict is None else judge.picked(verdict, len(whole))
        if place is None:
            self.terminal.notify("the judge picked none, so the first try is kept")
        tries.picked = whole[place or 0]

    def faults(self, text: str) -> list[str]:
        """Faults that the model finds in its answer; none, with a notice, if there is no verdict."""
        asked = judge.fault_messages(self.conversation, text)
        verdict = self._verdict(asked, judge.FAULTS_GRAMMAR, "judging the answer")
        found = None if verdict is None else judge.found_faults(verdict)
        if found is None:
            self.terminal.notify("the judge came to no verdict, so the answer stays")
        return found or []

    def mended(
        self, text: str, faults: Sequence[str], grammar: Grammar | None
    ) -> ReceivedAnswer | None:
        """The answer again, without these faults; None if it did not come to an end."""
        asked = judge.mending_messages(self.conversation, text, faults)
        answer = self._ask(asked, grammar, "mending the answer", self.setup.settings.max_tokens)
        if answer is None or answer.interrupted or not answer.texts[0].strip():
            return None
        return answer if answer.reasons.get(0) == "stop" else None

    def _verdict(self, asked: tuple[Message, ...], grammar: Grammar, doing: str) -> str | None:
        answer = self._ask(asked, grammar, doing, judge.JUDGE_TOKENS, greedy=True)
        return None if answer is None or answer.interrupted else answer.texts[0]

    def _ask(
        self,
        asked: tuple[Message, ...],
        grammar: Grammar | None,
        doing: str,
        max_tokens: int | None,
        *,
        greedy: bool = False,
    ) -> ReceivedAnswer | None:
        settings = self.setup.settings
        prompt = Messages(asked, thinking=settings.think, think_budget=settings.think_budget)
        request = msgspec.structs.replace(
            request_for(settings, prompt, grammar), n=1, max_tokens=max_tokens
        )
        if greedy:
            sampling = msgspec.structs.replace(request.sampling, temperature=0.0)
            request = msgspec.structs.replace(request, sampling=sampling, stop=())
        self.terminal.progress(doing)
        display = AnswerDisplay(
            self.terminal,
            print_text=False,
            reasoning=False,
            on_begin=lambda: self.terminal.progress(doing),
        )
        try:
            answer = receive(self.engine.generate(request), display)
        except ContextExceeded:
            self.terminal.notify("the judge's question does not fit into the context")
            return None
        if answer.done is not None:
            self.spent.append(answer.done.usage)
        return answer


@dataclass(frozen=True, slots=True)
class CritiqueReport:
    """What a critique brought, and what it cost."""

    faults: tuple[str, ...]
    mended: bool
    answer_tokens: int
    """Of the first answer alone."""
    answer_s: float
    tokens: int
    """Of answer, verdict and correction."""
    seconds: float

    def sentence(self) -> str:
        """Gain and cost in one line."""
        count = len(self.faults)
        found = "no fault found" if not count else f"{count} fault{'s' * (count > 1)} found"
        ended = (
            ", answer mended" if self.mended else ", the answer stays as it was" if count else ""
        )
        return (
            f"critique: {found}{ended} · {self.tokens:,} tokens in {self.seconds:.2f} s · "
            f"the first answer alone: {self.answer_tokens:,} tokens in {self.answer_s:.2f} s"
        )

    def as_json(self) -> dict[str, Any]:
        """The fields of `--json`."""
        return {
            "method": "critique",
            "faults": list(self.faults),
            "mended": self.mended,
            "completion_tokens": self.tokens,
            "total_s": round(self.seconds, 4),
            "first_tokens": self.answer_tokens,
            "first_s": round(self.answer_s, 4),
        }


def criticize(
    judge_: Judge, answer: ReceivedAnswer, grammar: Grammar | None
) -> CritiqueReport | None:
    """Judge a whole answer and mend it: the mended one becomes its second choice, and the chosen one.

    None if the answer was interrupted."""
    if answer.interrupted or answer.done is None:
        return None
    began_s, first, timings = time.monotonic(), answer.done.usage, answer.done.timings
    first_s = max(0.0, timings.total_s - timings.load_s)
    faults = judge_.faults(answer.texts[0])
    mended = judge_.mended(answer.texts[0], faults, grammar) if faults else None
    if mended is not None:
        answer.texts[1], answer.reasoning[1] = mended.texts[0], mended.reasoning[0]
        answer.reasons[1], answer.chosen = mended.reasons[0], 1
    add_usage(answer, judge_)
    total = first.completion_tokens + sum(usage.completion_tokens for usage in judge_.spent)
    return CritiqueReport(
        tuple(faults),
        mended is not None,
        first.completion_tokens,
        first_s,
        total,
        first_s + time.monotonic() - began_s,
    )


def add_usage(answer: ReceivedAnswer, judge_: Judge) -> None:
    """Count what the judge used as used by the answer."""
    if answer.done is None:
        return
    used = [answer.done.usage, *judge_.spent]
    summed = Usage(
        *(
            sum(getattr(usage, name) for usage in used)
            for name in (
                *("prompt_tokens", "cached_tokens", "completion_tokens"),
                "reasoning_tokens",
            )
        )
    )
    answer.done = msgspec.structs.replace(answer.done, usage=summed)
