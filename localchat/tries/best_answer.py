"""Best answer: try a prompt several times, or review its answer, and choose the answer to keep.

The tries are choices of one request: the engine computes their prompt once and decodes them as one batch.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

import msgspec

from localchat.engine.events import (
    Accepted,
    AnswerProgress,
    Done,
    Event,
    Finished,
    Loading,
    MetricsSnapshot,
    Prefill,
    Reasoning,
    Text,
    ToolCall,
    Usage,
)
from localchat.engine.interface import Engine
from localchat.engine.request import GenerateRequest
from localchat.engine.stream import Stream
from localchat.tries.judge import Judge, Review, sum_usage
from localchat.tries.relay import Relay
from localchat.tries.spec import Method, TriesSpec
from localchat.tries.vote import Extractor, Vote, last_number

_STOP_TIMEOUT_S = 1.0
_NO_USAGE = Usage(0, 0, 0)


@dataclass(slots=True)
class LogprobMean:
    """Mean log probability of the tokens of a text."""

    total: float = 0.0
    tokens: int = 0

    def add(self, event: Text) -> None:
        """Add the tokens of a piece."""
        self.total += sum(token.logprob for token in event.logprobs)
        self.tokens += len(event.logprobs)

    @property
    def value(self) -> float | None:
        """The mean, or None without tokens."""
        if not self.tokens:
            return None
        return self.total / self.tokens


@dataclass(slots=True)
class Tries:
    """Collects the tries of one request from its events."""

    count: int
    method: Method
    extractor: Extractor = last_number
    clock: Callable[[], float] = time.monotonic
    texts: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    means: defaultdict[int, LogprobMean] = field(default_factory=lambda: defaultdict(LogprobMean))
    events: defaultdict[int, list[Event]] = field(default_factory=lambda: defaultdict(list))
    """Text, reasoning, tool calls and end of each try."""
    complete: set[int] = field(default_factory=set)
    """Tries that ended by themselves. The others were cut off or have not ended."""
    picked: int | None = None
    """Try that the judge chose."""
    no_verdict: str = ""
    """Why the judge chose no try."""
    judge_tokens: int = 0
    """Tokens that the judge generated."""
    first_s: float | None = None
    """Time until the first try ended."""
    usage: Usage = _NO_USAGE
    """Usage so far. Completion tokens are a lower bound until `Done`."""
    vote: Vote = field(init=False)
    _began_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.vote = Vote(self.count)
        self._began_s = self.clock()

    def add(self, event: Event) -> None:
        """Add the next event of the request."""
        match event:
            case Loading():
                self._began_s = self.clock()  # the load is not a cost of the tries
            case Accepted(prompt_tokens=tokens):
                self._count(prompt_tokens=tokens)
            case Prefill(cached=tokens):
                self._count(cached_tokens=tokens)
            case Text(choice=choice, text=text):
                self.texts[choice] += text
                self.means[choice].add(event)
                self._count(completion_tokens=self.tokens + max(1, len(event.logprobs)))
            case Reasoning():
                self._count(
                    completion_tokens=self.tokens + 1,
                    reasoning_tokens=self.usage.reasoning_tokens + 1,
                )
            case Finished(choice=choice, reason=reason):
                self._end(choice, complete=reason not in ("length", "repetition"))
            case MetricsSnapshot(completion_tokens=tokens):
                self._count(completion_tokens=max(self.tokens, tokens))
            case Done(usage=usage):
                self.usage = usage
        if isinstance(event, Text | Reasoning | ToolCall | Finished):
            self.events[event.choice].append(event)

    def _count(self, **counts: int) -> None:
        self.usage = msgspec.structs.replace(self.usage, **counts)

    def _end(self, choice: int, *, complete: bool) -> None:
        if self.first_s is None:
            self.first_s = self.seconds
        answer = None
        # A text that was cut off lacks its answer, and another number would be mistaken for it.
        if complete:
            self.complete.add(choice)
            answer = self.extractor(self.texts[choice])
        self.vote.add(choice, answer)

    @property
    def decided(self) -> bool:
        """Return True if the tries that still run can be cancelled."""
        if self.method == "vote":
            return self.vote.decided
        return not self.vote.open

    @property
    def chosen(self) -> int:
        """Try to keep: the judge's, the first of the winning answer, or the most probable one."""
        if self.picked is not None:
            return self.picked
        if self.method == "vote":
            return self.vote.chosen
        if self.no_verdict:
            return min(self.candidates, default=0)
        ended = sorted(self.vote.answers) or sorted(self.texts)
        return max(
            ended, key=lambda number: (number in self.complete, self._mean(number)), default=0
        )

    @property
    def candidates(self) -> list[int]:
        """Tries for a judge to choose from: the complete ones, or else all."""
        return sorted(self.complete) or sorted(self.texts)

    def _mean(self, number: int) -> float:
        mean = self.means[number].value
        return -inf if mean is None else mean

    @property
    def tokens(self) -> int:
        """Tokens generated in all tries so far."""
        return self.usage.completion_tokens

    @property
    def seconds(self) -> float:
        """Time since the tries began, without the load."""
        return self.clock() - self._began_s

    def progress(self) -> str:
        """Return how many tries are done, and how many agree."""
        progress = f"{len(self.vote.answers)} of {self.count} tries done"
        votes = self.vote.counts
        if votes:
            progress += f", {max(votes.values())} agree"
        return progress

    @property
    def notice(self) -> str:
        """Sentence about a missing verdict. Empty if there is a verdict, or none was asked for."""
        if not self.no_verdict:
            return ""
        return f"{self.no_verdict}, so the first try was kept"

    def sentence(self) -> str:
        """Return outcome and cost so far in one line."""
        tokens = self.tokens + self.judge_tokens
        parts = [self._outcome(), f"{tokens:,} tokens in {self.seconds:.2f} s"]
        if self.first_s is not None:
            parts.append(f"first try ready after {self.first_s:.2f} s")
        return f"{self.count} tries: " + " · ".join(parts)

    def _outcome(self) -> str:
        if self.method == "vote":
            return self._votes()
        if self.picked is not None:
            return f"the judge took try {self.picked + 1}"
        if self.no_verdict:
            return self.notice
        chosen = self.chosen
        mean = self.means[chosen].value
        if mean is None:
            return "no log probabilities, so the first is kept"
        outcome = f"try {chosen + 1} has mean log probability {mean:.3f}"
        first_mean = self.means[0].value
        if first_mean is not None and chosen:
            outcome += f", the first has {first_mean:.3f}"
        return outcome

    def _votes(self) -> str:
        votes = self.vote.counts
        if not votes:
            return (
                "a vote compares final numbers or choices, and these answers have none, so the first "
                f"is kept. The method best compares texts: best {self.count}"
            )
        parts = [", ".join(f"{count} say {answer[:40]}" for answer, count in votes.most_common())]
        if without := len(self.vote.answers) - votes.total():
            parts.append(f"{without} without an answer")
        if self.vote.open:
            parts.append(f"{self.vote.open} cancelled")
        first_answer = self.vote.answers.get(0)
        if first_answer == self.vote.leader:
            parts.append("the first alone says the same")
        elif first_answer is not None:
            parts.append("the first alone differs")
        return ", ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """Return outcome and cost so far, as `--json` and the HTTP endpoint report them."""
        fields: dict[str, Any] = {
            "method": self.method,
            "tries": self.count,
            "ended": len(self.vote.answers),
            "chosen": self.chosen,
        }
        if self.method == "vote":
            fields["answer"] = self.vote.leader
            fields["votes"] = dict(self.vote.counts.most_common())
        else:
            fields["mean_logprob"] = self.means[self.chosen].value
            fields["judged"] = self.picked is not None
        return fields | {
            "completion_tokens": self.tokens + self.judge_tokens,
            "total_s": round(self.seconds, 4),
            "first_s": None if self.first_s is None else round(self.first_s, 4),
        }


@dataclass(frozen=True, slots=True)
class CritiqueReport:
    """Outcome and cost of a critique."""

    review: Review
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

    @property
    def notice(self) -> str:
        """Sentence about a missing verdict; empty if there is one."""
        return self.review.outcome if self.review.no_verdict else ""

    def as_json(self) -> dict[str, Any]:
        """Return the fields of `--json` and of the HTTP endpoint, with both answers."""
        return self.review.as_json() | {
            "completion_tokens": self.tokens,
            "total_s": round(self.seconds, 4),
            "first_tokens": self.first_tokens,
            "first_s": round(self.first_s, 4),
        }


class BestAnswer:
    """Answer that is chosen from several tries. `report` describes it once `stream` has ended."""

    def __init__(
        self, engine: Engine, request: GenerateRequest, spec: TriesSpec, *, live: bool
    ) -> None:
        """Raises UsageError for a request whose tries would be equal."""
        self._engine = engine
        self._request = spec.widen(request)
        self._spec = spec
        self._live = live
        self._relay = Relay(self._produce)
        self._done: Done | None = None
        self._review: Review | None = None
        self._judge: Judge | None = None
        if spec.needs_judge:
            self._judge = Judge(self._generate, self._request, self._show_progress)
        self.tries = Tries(spec.count, spec.method or "best_of", spec.extractor or last_number)

    @property
    def stream(self) -> Stream:
        """Events of the answer."""
        return self._relay.stream

    def start(self) -> None:
        self._relay.start()

    def stop(self) -> None:
        """Cancel whatever runs. `tries` does not change afterwards."""
        self.stream.close()
        self._relay.join(_STOP_TIMEOUT_S)

    @property
    def chosen(self) -> int:
        """Number of the kept try. A correction counts as the try after the last one."""
        if self._review is not None and self._review.replaced:
            return self._spec.count
        return self.tries.chosen

    @property
    def review(self) -> Review | None:
        """Outcome of a critique, once it has ended."""
        return self._review

    @property
    def usage(self) -> Usage:
        """Usage of all tries and of all questions to the judge."""
        if self._judge is None:
            return self.tries.usage
        return sum_usage(self.tries.usage, self._judge.spent)

    @property
    def report(self) -> Tries | CritiqueReport | None:
        """Outcome and cost. None for a critique that has not ended."""
        tries = self.tries
        if not self._spec.critique:
            return tries
        if self._review is None:
            return None
        return CritiqueReport(
            self._review,
            tries.tokens,
            tries.first_s or 0.0,
            tries.tokens + tries.judge_tokens,
            tries.seconds,
        )

    def _produce(self) -> None:
        self._collect()
        if self._spec.critique:
            self._criticize()
        elif self._spec.judge:
            self._pick()
        # The judge generates on the same engine, so its tokens are part of the cost.
        if self._judge is not None:
            self.tries.judge_tokens = self._judge.tokens
        if not self._live:
            self._send_chosen()
        # A decided vote has cancelled its request, which then has no `Done`.
        if self._done is not None:
            self._relay.send(msgspec.structs.replace(self._done, usage=self.usage))

    def _collect(self) -> None:
        """Collect the tries until all have ended, or a vote is decided."""
        tries = self.tries
        with self._generate(self._request) as stream:
            for event in stream:
                tries.add(event)
                if isinstance(event, Done):
                    self._done = event
                elif self._live or not isinstance(event, Text | Reasoning | ToolCall | Finished):
                    self._relay.send(event)
                if isinstance(event, Finished) and self._spec.method is not None:
                    self._show_progress(tries.progress())
                    # No open try can change the outcome. Leaving the block cancels all of them.
                    if tries.decided and tries.vote.open:
                        return

    def _pick(self) -> None:
        """Let the judge choose a try. Without a verdict the first complete one is kept."""
        assert self._judge is not None
        tries = self.tries
        candidates = tries.candidates
        if len(candidates) < 2:
            tries.no_verdict = "only one try was complete"
            return
        index = self._judge.pick([tries.texts[number] for number in candidates])
        if index is None:
            tries.no_verdict = self._judge.no_verdict
        else:
            tries.picked = candidates[index]

    def _criticize(self) -> None:
        """Review the answer. A correction that replaces it is sent as another try."""
        assert self._judge is not None
        tries = self.tries
        if 0 not in tries.complete:
            self._review = Review(tries.texts[0], no_verdict="the answer was cut off")
            return
        self._review = self._judge.review(tries.texts[0])
        if self._review.replaced and self._review.correction is not None:
            number = self._spec.count
            for event in self._review.correction.events:
                tries.events[number].append(_renumbered(event, number))
            if self._live:
                self._relay.send(*tries.events[number])

    def _send_chosen(self) -> None:
        self._relay.send(*(_renumbered(event, 0) for event in self.tries.events[self.chosen]))

    def _generate(self, request: GenerateRequest) -> Stream:
        return self._relay.generate(self._engine, request)

    def _show_progress(self, phrase: str) -> None:
        self._relay.send(AnswerProgress(phrase))


def best_answer(
    engine: Engine, request: GenerateRequest, spec: TriesSpec, *, live: bool = False
) -> BestAnswer:
    """Start to answer a request by several tries. Raise UsageError if all tries would be equal.

    The stream has the events of the chosen try as choice 0, once it is chosen. With `live` it has the events
    of all tries as they arrive, numbered as they are, and a correction behind them.
    """
    best = BestAnswer(engine, request, spec, live=live)
    best.start()
    return best


def _renumbered(event: Event, choice: int) -> Event:
    return msgspec.structs.replace(event, choice=choice)
