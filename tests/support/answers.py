"""An answer gathered from a stream of events, for tests."""

from dataclasses import dataclass, field
from itertools import groupby

from localchat.engine.events import (
    Accepted,
    Done,
    Event,
    Finished,
    Loading,
    MetricsSnapshot,
    Prefill,
    PromptLogprobs,
    Queued,
    Text,
    TokenLogprob,
)
from localchat.engine.interface import Engine
from localchat.engine.request import GenerateRequest


@dataclass
class Answer:
    """Everything that came. `pieces`: texts of choice 0 in order."""

    events: list[Event] = field(default_factory=list)

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def accepted(self) -> Accepted:
        assert isinstance(self.events[0], Accepted)
        return self.events[0]

    @property
    def done(self) -> Done:
        assert isinstance(self.events[-1], Done)
        return self.events[-1]

    @property
    def pieces(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, Text) and not event.choice]

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def texts(self) -> list[str]:
        count = 1 + max(event.choice for event in self.events if isinstance(event, Finished))
        return [
            "".join(e.text for e in self.events if isinstance(e, Text) and e.choice == choice)
            for choice in range(count)
        ]

    @property
    def reasons(self) -> list[str]:
        return [event.reason for event in self.events if isinstance(event, Finished)]

    @property
    def stops(self) -> list[str]:
        return [event.stop for event in self.events if isinstance(event, Finished)]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [entry for e in self.events if isinstance(e, Text) for entry in e.logprobs]

    @property
    def prompt_logprobs(self) -> list[TokenLogprob]:
        return [entry for e in self.events if isinstance(e, PromptLogprobs) for entry in e.tokens]

    def phases(self) -> list[tuple[str, int]]:
        """Kinds of events in order, runs of the same kind as one; what comes at any time left out."""
        told = [e for e in self.events if not isinstance(e, MetricsSnapshot | Loading | Queued)]
        names = [type(event).__name__.lower() for event in told]
        return [(name, len(list(run))) for name, run in groupby(names)]


def ask(engine: Engine, request: GenerateRequest) -> Answer:
    """Ask and wait for the whole answer."""
    answer = Answer()
    for event in engine.generate(request):
        answer.events.append(event)
        assert not isinstance(event, Prefill) or event.done <= event.total
    return answer


def told_apart(one: Answer, other: Answer) -> float:
    """How far the best two candidates were apart where two greedy texts first differ (natural log, in the
    first text); 0 where they are equal."""
    for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
        if mine.token != theirs.token:
            return mine.top[0][2] - mine.top[1][2]
    return 0.0
