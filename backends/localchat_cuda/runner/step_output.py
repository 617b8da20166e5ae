"""Results of a launched step: copies in pinned memory, complete once the step's event is."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from localchat.backend_api.interface import LogitsPosition, Sample, StepPlan, StepResult, StepStatus
from localchat_cuda.runner.input_batch import StepShape

DEPTH = 2
"""Steps in flight."""


class TopLogprobs(NamedTuple):
    """Log probabilities at P logits positions, in host memory."""

    numbers: tuple[int, ...]
    """Numbers of the positions in the plan."""
    own: torch.Tensor
    """Log probability of the token itself [P]."""
    top: torch.Tensor
    """Log probabilities of the best K candidates [P, K]. A position may request fewer."""
    top_ids: torch.Tensor
    """Tokens of the candidates [P, K]."""


class ResultRing:
    """Host memory to which kernels write the results of the steps in flight."""

    def __init__(self, words: int, *, pinned: bool) -> None:
        """`words`: int32 values of a step. `pinned`: for a GPU."""
        self._hosts = [
            torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for _ in range(DEPTH + 1)
        ]
        self._current = 0

    def begin_step(self) -> None:
        """Switch to the memory of the oldest step."""
        self._current = (self._current + 1) % len(self._hosts)

    @property
    def address(self) -> int:
        """Address of the current step's results."""
        return self._hosts[self._current].data_ptr()

    def rows(self, width: int) -> torch.Tensor:
        """Return the current step's results [2, width], complete once the step's event is."""
        return self._hosts[self._current][: 2 * width].view(2, width)


@dataclass(slots=True)
class PendingStep:
    """Launched step that is not collected yet."""

    plan: StepPlan
    launched_s: float
    shape: StepShape | None = None
    """Shape of the computation; None: the step computes nothing."""
    status: StepStatus = "ok"
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    """Start and end on the GPU."""
    sampled: dict[int, int] = field(default_factory=dict)
    """Index in `tokens` and `logprobs` for each sampled position of the plan."""
    tokens: torch.Tensor | None = None
    logprobs: torch.Tensor | None = None
    top_counts: dict[int, int] = field(default_factory=dict)
    """Alternatives requested for each sampled position; -1: not even its log probability."""
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    """Log probabilities of sampled positions."""
    prompt_logprobs: list[TopLogprobs] = field(default_factory=list)
    notes: tuple[str, ...] = ()
    typical: bool = True
    """The time of the step predicts that of later steps."""
    host_s: float = 0.0
    """Host time of the launch."""

    def result(self, elapsed_s: float) -> StepResult:
        """Return the outcome of the step, once its event is complete."""
        plan = self.plan
        if self.status != "ok":
            computed = (0,) * len(plan.rows)
            return StepResult(
                plan.number, (), computed, (), self.status, elapsed_s, notes=self.notes
            )
        if plan.moved:
            assert self.tokens is not None
            tokens = self.tokens.tolist()
            return StepResult(
                plan.number,
                (),
                (1,) * len(plan.rows),
                elapsed_s=elapsed_s,
                notes=self.notes,
                tokens=tuple(tokens[self.sampled[number]] for number in range(len(plan.rows))),
            )
        samples = self._samples()
        for logprobs in self.prompt_logprobs:
            for index, number in enumerate(logprobs.numbers):
                position = plan.positions[number]
                top = _best(logprobs, index, position.top)
                samples[number] = Sample(number, position.token, float(logprobs.own[index]), top)
        return StepResult(
            number=plan.number,
            samples=tuple(samples[number] for number in sorted(samples)),
            computed=tuple(row.width for row in plan.rows),
            elapsed_s=elapsed_s,
            notes=self.notes,
        )

    def _samples(self) -> dict[int, Sample]:
        """Return the samples, without those after a rejected draft token."""
        samples: dict[int, Sample] = {}
        if self.tokens is None or self.logprobs is None:
            return samples
        plan = self.plan
        tokens = self.tokens.tolist()
        logprobs = self.logprobs.tolist()
        tops = {
            number: _best(candidates, index, self.top_counts[number])
            for candidates in self.top_logprobs
            for index, number in enumerate(candidates.numbers)
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
            logprob = logprobs[index] if self.top_counts[number] >= 0 else None
            samples[number] = Sample(number, token, logprob, tops.get(number, ()))
        return samples


def _rejects(position: LogitsPosition, token: int, width: int, drafts: tuple[int, ...]) -> bool:
    """Return True if the sampled token differs from the draft token at the next position."""
    index = position.offset - (width - len(drafts) - 1)
    return index < len(drafts) and token != drafts[index]


def _best(logprobs: TopLogprobs, index: int, count: int) -> tuple[tuple[int, float], ...]:
    """Return the best candidates of a position, sorted by log probability and id."""
    if count <= 0:
        return ()
    candidates = zip(logprobs.top_ids[index].tolist(), logprobs.top[index].tolist(), strict=True)
    return tuple(sorted(candidates, key=lambda item: (-item[1], item[0]))[:count])
