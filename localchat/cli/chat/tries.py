"""Ask a model about its own answers: which of several is the best, or what is wrong with one."""

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from localchat.cli.chat.render_answer import AnswerDisplay, ReceivedAnswer, receive
from localchat.cli.resolve import Setup, request_for
from localchat.cli.streams import Terminal
from localchat.engine.events import Usage
from localchat.engine.interface import Engine
from localchat.engine.request import Grammar, Message, Messages
from localchat.errors import ContextExceeded
from localchat.tries import judge
from localchat.tries.collection import Tries
from localchat.tries.critique import Critique, JudgeQuestion, critique


@dataclass(slots=True)
class Judge:
    """Asks the model that answered for a verdict on its answers."""

    setup: Setup
    engine: Engine
    conversation: tuple[Message, ...]
    """That was answered."""
    spent: list[Usage] = field(default_factory=list)
    """Usage of the requests so far."""
    corrected: ReceivedAnswer | None = None
    """The second answer of a critique, with its reasoning."""

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
        grammar = judge.pick_grammar(len(whole))
        verdict = self._reply(JudgeQuestion("picking the best", asked, grammar))
        place = None if verdict is None else judge.picked(verdict, len(whole))
        if place is None:
            self.terminal.notify("the judge gave no verdict, so the first try was kept")
        tries.picked = whole[place or 0]

    def critique(self, text: str, grammar: Grammar | None) -> Critique:
        """Review an answer. The outcome keeps it unless a correction wins a comparison."""
        steps = critique(self.conversation, text, grammar, self.setup.settings.max_tokens)
        try:
            question = next(steps)
            while True:
                question = steps.send(self._reply(question))
        except StopIteration as end:
            outcome: Critique = end.value
            return outcome

    def _reply(self, question: JudgeQuestion) -> str | None:
        """Return the whole reply to a question; None if it did not end by itself."""
        answer = self._ask(
            question.messages,
            question.grammar,
            question.purpose,
            question.max_tokens,
            greedy=question.greedy,
        )
        if answer is None or answer.interrupted or answer.reasons.get(0) != "stop":
            return None
        if not question.greedy:
            self.corrected = answer
        return answer.texts[0]

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
            self.terminal.notify("the judge's question does not fit in the context")
            return None
        if answer.done is not None:
            self.spent.append(answer.done.usage)
        return answer


@dataclass(frozen=True, slots=True)
class CritiqueReport:
    """Outcome and cost of a critique."""

    review: Critique
    first_tokens: int
    first_s: float
    tokens: int
    """Tokens of the answer and of all questions to the judge."""
    seconds: float

    def sentence(self) -> str:
        """Return outcome and cost in one line."""
        return (
            f"critique: {self.review.outcome} · {self.tokens:,} tokens in {self.seconds:.2f} s · "
            f"the first answer alone: {self.first_tokens:,} tokens in {self.first_s:.2f} s"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the fields of `--json`, with both answers."""
        return self.review.as_json() | {
            "completion_tokens": self.tokens,
            "total_s": round(self.seconds, 4),
            "first_tokens": self.first_tokens,
            "first_s": round(self.first_s, 4),
        }


def criticize(
    judge_: Judge, answer: ReceivedAnswer, grammar: Grammar | None
) -> CritiqueReport | None:
    """Review a whole answer. A correction that wins becomes the second choice, and the chosen one.

    Return None if the answer did not end by itself."""
    if answer.interrupted or answer.done is None or answer.reasons.get(0) != "stop":
        return None
    began_s = time.monotonic()
    usage = answer.done.usage
    first_s = max(0.0, answer.done.timings.total_s - answer.done.timings.load_s)
    review = judge_.critique(answer.texts[0], grammar)
    if review.replaced and judge_.corrected is not None:
        corrected = judge_.corrected
        answer.texts[1] = corrected.texts[0]
        answer.reasoning[1] = corrected.reasoning[0]
        answer.reasons[1] = corrected.reasons[0]
        answer.ends[1] = corrected.ends[0]
        answer.chosen = 1
    add_usage(answer, judge_)
    tokens = usage.completion_tokens + sum(spent.completion_tokens for spent in judge_.spent)
    seconds = first_s + time.monotonic() - began_s
    return CritiqueReport(review, usage.completion_tokens, first_s, tokens, seconds)


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
