"""A backend whose steps compute nothing: the cost that is left is that of the host.

`--backend scripts.bench.server.echo_backend:EchoBackend` opens a GGUF file for its tokenizer and chat template.
Its runner has the capabilities of a GPU: a paged cache, two steps in flight, plans that move rows. Answers are
words in random order. `LOCALCHAT_BENCH_STEP_US` in the environment is the time of a step. 0: none at all.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from localchat.backend_api.interface import (
    Capabilities,
    LoadRequest,
    MemoryReport,
    OpenModel,
    Progress,
    Runner,
    Sample,
    StepPlan,
    StepResult,
)
from localchat.measure.workload import sample_text
from localchat_llamacpp.backend import LlamaCppBackend

STEP_US = "LOCALCHAT_BENCH_STEP_US"
"""Name of the variable in the environment."""
_BLOCK_TOKENS = 64
_MAX_STEP_TOKENS = 4096
_TEXT_TOKENS = 4096
_SHORTEST_STEP_S = 1e-4


class EchoRunner:
    """Samples the token that the text of a sequence has at a position.

    `next_text`: returns the text of the next sequence. `step_s`: time of a step by the tokens that it computes,
    as the result reports it. `waits`: whether `collect` takes that time.
    """

    def __init__(
        self,
        capabilities: Capabilities,
        next_text: Callable[[], list[int]],
        step_s: Callable[[int], float],
        *,
        waits: bool = False,
    ) -> None:
        self.capabilities = capabilities
        self._next_text = next_text
        self._step_s = step_s
        self._waits = waits
        self._texts: dict[int, list[int]] = {}
        self._launched: list[tuple[StepPlan, float]] = []
        self._end_s = 0.0
        """Time at which the last collected step ended."""

    def launch(self, plan: StepPlan) -> None:
        for entry in plan.enter:
            self._texts[entry.seq] = self._next_text()
        for seq in plan.leave:
            self._texts.pop(seq, None)
        self._launched.append((plan, time.perf_counter()))

    def collect(self) -> StepResult:
        plan, launched_s = self._launched.pop(0)
        widths = tuple(row.width for row in plan.rows)
        elapsed_s = self._step_s(sum(widths))
        if self._waits:
            # Steps follow each other without a gap, as on a GPU.
            self._end_s = max(self._end_s, launched_s) + elapsed_s
            time.sleep(max(0.0, self._end_s - time.perf_counter()))
        if plan.moved:
            moved = plan.moved + 1
            tokens = tuple(self._token(row.seq, row.start + moved) for row in plan.rows)
            return StepResult(plan.number, (), widths, elapsed_s=elapsed_s, tokens=tokens)
        return StepResult(plan.number, self._samples(plan), widths, elapsed_s=elapsed_s)

    def _samples(self, plan: StepPlan) -> tuple[Sample, ...]:
        samples: list[Sample] = []
        rejected = -1
        for number, target in enumerate(plan.positions):
            if target.row == rejected:
                continue
            row = plan.rows[target.row]
            token = self._token(row.seq, row.start + target.offset + 1)
            samples.append(Sample(number, token))
            draft = target.offset - (row.width - len(row.drafts)) + 1
            if draft < len(row.drafts) and row.drafts[draft] != token:
                rejected = target.row
        return tuple(samples)

    def _token(self, seq: int, position: int) -> int:
        text = self._texts[seq]
        return text[position % len(text)]

    def abort(self) -> None:
        pass

    def warm_up_next(self) -> bool:
        return False

    def memory(self) -> MemoryReport:
        return MemoryReport(0, 0, 0, 0)

    def close(self) -> None:
        pass


class EchoBackend(LlamaCppBackend):
    """See the module."""

    name = "echo"

    def open(self, path: Path, notify: Callable[[str], None]) -> OpenModel:
        model = super().open(path, notify)
        step_us = float(os.environ.get(STEP_US, "0"))
        # Words in random order: drafts find nothing to copy in other answers.
        words = np.array(model.tokenizer.encode(" ".join(sample_text().split())))
        draw = np.random.default_rng(0)

        def next_text() -> list[int]:
            tokens: list[int] = draw.choice(words, _TEXT_TOKENS).tolist()
            return tokens

        def load(request: LoadRequest, progress: Progress, notify: Callable[[str], None]) -> Runner:
            progress(1, 1)
            slots = request.options.max_slots
            context = request.plan.context_tokens
            return EchoRunner(
                Capabilities(
                    context_tokens=context,
                    kv_tokens=context * slots,
                    max_slots=slots,
                    max_rows=slots,
                    max_step_tokens=_MAX_STEP_TOKENS,
                    depth=2,
                    block_tokens=_BLOCK_TOKENS,
                    moves_rows=True,
                    bytes_per_token=1000,
                ),
                next_text,
                lambda _width: max(step_us / 1e6, _SHORTEST_STEP_S),
                waits=step_us > 0,
            )

        model.load = load  # type: ignore[method-assign]
        return model
