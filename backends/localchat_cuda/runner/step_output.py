"""What a launched step brings home: copies to pinned memory that have ended when its event has."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from localchat.backend_api.interface import LogitsPosition, Sample, StepPlan, StepResult, StepStatus


class TopLogprobs(NamedTuple):
    """Log probabilities of points, in host memory: own [P], the best candidates [P, K] and their ids.
    numbers: of the points. K may be more than a point asked for."""

    numbers: tuple[int, ...]
    own: torch.Tensor
    top: torch.Tensor
    ids: torch.Tensor


@dataclass(slots=True)
class PendingStep:
    """A launched step. drawn: by number of a sampled point, its place in `tokens` and `logprobs`."""

    plan: StepPlan
    begun_s: float
    status: StepStatus = "ok"
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    drawn: dict[int, int] = field(default_factory=dict)
    tokens: torch.Tensor | None = None
    logprobs: torch.Tensor | None = None
    wants: dict[int, int] = field(default_factory=dict)
    """Alternatives wanted by sampled point; -1: no log probability either."""
    judged: list[TopLogprobs] = field(default_factory=list)
    prompt: list[TopLogprobs] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    typical: bool = True
    """Whether the time that it takes says anything of later steps."""
    host_s: float = 0.0
    """What the launch took of the host's time."""

    def result(self, elapsed_s: float) -> StepResult:
        """The step's outcome, once everything is home."""
        plan = self.plan
        if self.status != "ok":
            nothing = (0,) * len(plan.rows)
            return StepResult(
                plan.number, (), nothing, (), self.status, elapsed_s, notes=self.notes
            )
        samples = self._drawn()
        for judged in self.prompt:
            for i, number in enumerate(judged.numbers):
                point = plan.positions[number]
                own, top = float(judged.own[i]), _best(judged, i, point.top)
                samples[number] = Sample(number, point.token, own, top)
        return StepResult(
            number=plan.number,
            samples=tuple(samples[number] for number in sorted(samples)),
            computed=tuple(row.width for row in plan.rows),
            elapsed_s=elapsed_s,
            notes=self.notes,
        )

    def _drawn(self) -> dict[int, Sample]:
        """Sampled points; those behind a draft that was wrong are left out."""
        samples: dict[int, Sample] = {}
        if self.tokens is None or self.logprobs is None:
            return samples
        plan = self.plan
        tokens, logprobs = self.tokens.tolist(), self.logprobs.tolist()
        tops = {
            number: _best(judged, i, self.wants[number])
            for judged in self.judged
            for i, number in enumerate(judged.numbers)
        }
        wrong: set[int] = set()
        for number in sorted(self.drawn):
            at = self.drawn[number]
            point, token = plan.positions[number], tokens[at]
            row = plan.rows[point.row]
            if row.drafts:
                if point.row in wrong:
                    continue
                if _differs(point, token, row.width, row.drafts):
                    wrong.add(point.row)
            wanted = self.wants[number]
            own = logprobs[at] if wanted >= 0 else None
            samples[number] = Sample(number, token, own, tops.get(number, ()))
        return samples


def _differs(point: LogitsPosition, token: int, width: int, drafts: tuple[int, ...]) -> bool:
    """Whether a point's token is another than the draft behind it."""
    at = point.offset - (width - len(drafts) - 1)
    return at < len(drafts) and token != drafts[at]


def _best(judged: TopLogprobs, i: int, count: int) -> tuple[tuple[int, float], ...]:
    """The best candidates of a point, best first, the lower id among equals."""
    if count <= 0:
        return ()
    found = zip(judged.ids[i].tolist(), judged.top[i].tolist(), strict=True)
    return tuple(sorted(found, key=lambda one: (-one[1], one[0]))[:count])
