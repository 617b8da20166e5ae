"""Results of a launched step: copies to pinned memory, complete once the step's event is."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from localchat.backend_api.interface import LogitsPosition, Sample, StepPlan, StepResult, StepStatus
from localchat_cuda.runner.input_batch import StepShape


class TopLogprobs(NamedTuple):
    """Log probabilities at P logits positions, in host memory."""

    numbers: tuple[int, ...]
    """Of the positions in the plan."""
    own: torch.Tensor
    """Of the token itself [P]."""
    top: torch.Tensor
    """Of the best K candidates [P, K]; K may be more than a position asked for."""
    top_ids: torch.Tensor
    """Tokens of the candidates [P, K]."""


class ResultRing:
    """Memory of the host for the sampled tokens and log probabilities of several steps, which kernels write."""

    def __init__(self, steps: int, words: int, *, pinned: bool) -> None:
        """`steps`: one more than can be in flight. `words`: int32 values of a step. `pinned`: for a GPU."""
        self._hosts = [
            torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for _ in range(steps)
        ]
        self._current = 0

    def begin_step(self) -> None:
        """Switch to the memory that has been read longest."""
        self._current = (self._current + 1) % len(self._hosts)

    @property
    def address(self) -> int:
        """Of the current step's results."""
        return self._hosts[self._current].data_ptr()

    def rows(self, width: int) -> torch.Tensor:
        """The current step's results [2, width], complete once the step's event is."""
        return self._hosts[self._current][: 2 * width].view(2, width)


@dataclass(slots=True)
class PendingStep:
    """A launched step that was not collected yet."""

    plan: StepPlan
    launched_s: float
    shape: StepShape | None = None
    """None: it computes nothing."""
    status: StepStatus = "ok"
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    """Begin and end on the GPU."""
    sampled: dict[int, int] = field(default_factory=dict)
    """By number of a sampled position, its index in `tokens` and `logprobs`."""
    tokens: torch.Tensor | None = None
    logprobs: torch.Tensor | None = None
    top_counts: dict[int, int] = field(default_factory=dict)
    """By number of a sampled position, the alternatives asked for; -1: no log probability either."""
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    """Of sampled positions."""
    prompt_logprobs: list[TopLogprobs] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    typical: bool = True
    """The step's time predicts that of later ones."""
    host_s: float = 0.0
    """Host time of the launch."""

    def result(self, elapsed_s: float) -> StepResult:
        """The step's outcome, once its event is complete."""
        plan = self.plan
        if self.status != "ok":
            nothing = (0,) * len(plan.rows)
            return StepResult(
                plan.number, (), nothing, (), self.status, elapsed_s, notes=self.notes
            )
        samples = self._samples()
        for logprobs in self.prompt_logprobs:
            for i, number in enumerate(logprobs.numbers):
                position = plan.positions[number]
                own = float(logprobs.own[i])
                top = _best(logprobs, i, position.top)
                samples[number] = Sample(number, position.token, own, top)
        return StepResult(
            number=plan.number,
            samples=tuple(samples[number] for number in sorted(samples)),
            computed=tuple(row.width for row in plan.rows),
            elapsed_s=elapsed_s,
            notes=self.notes,
        )

    def _samples(self) -> dict[int, Sample]:
        """Sampled positions, without those after a rejected draft."""
        samples: dict[int, Sample] = {}
        if self.tokens is None or self.logprobs is None:
            return samples
        plan = self.plan
        tokens = self.tokens.tolist()
        logprobs = self.logprobs.tolist()
        tops = {
            number: _best(candidates, i, self.top_counts[number])
            for candidates in self.top_logprobs
            for i, number in enumerate(candidates.numbers)
        }
        rejected_rows: set[int] = set()
        for number in sorted(self.sampled):
            index = self.sampled[number]
            position = plan.positions[number]
            token = tokens[index]
            row = plan.rows[position.row]
            if row.drafts:
                if position.row in rejected_rows:
                    continue
                if _rejects(position, token, row.width, row.drafts):
                    rejected_rows.add(position.row)
            own = logprobs[index] if self.top_counts[number] >= 0 else None
            samples[number] = Sample(number, token, own, tops.get(number, ()))
        return samples


def _rejects(position: LogitsPosition, token: int, width: int, drafts: tuple[int, ...]) -> bool:
    """True if the sampled token differs from the draft at the next position."""
    at = position.offset - (width - len(drafts) - 1)
    return at < len(drafts) and token != drafts[at]


def _best(logprobs: TopLogprobs, i: int, count: int) -> tuple[tuple[int, float], ...]:
    """The best candidates of a position, best first, the lower id among equals."""
    if count <= 0:
        return ()
    found = zip(logprobs.top_ids[i].tolist(), logprobs.top[i].tolist(), strict=True)
    return tuple(sorted(found, key=lambda one: (-one[1], one[0]))[:count])
