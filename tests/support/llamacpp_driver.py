"""Makes plans for a runner, the way the loop would, for tests that want one thing at a time."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from localchat.backend_api.interface import (
    LAST,
    Enter,
    LogitsPosition,
    Mask,
    MemoryOp,
    Runner,
    SamplingParams,
    StepPlan,
    StepResult,
    StepRow,
)
from localchat.fit.memory_plan import MemoryPlan

GREEDY = SamplingParams(temperature=0.0)


def plan_of(context: int, step: int, kv_type: str = "f16", flash: bool = False) -> MemoryPlan:
    """A memory plan with these numbers, that fits."""
    return MemoryPlan(
        backend="llamacpp",
        weights_bytes=0,
        kv_bytes=0,
        compute_bytes=0,
        overhead_bytes=0,
        free_bytes=0,
        fits=True,
        context_tokens=context,
        max_context_tokens=context,
        kv_type=kv_type,
        flash_attention=flash,
        gpu_layers=0,
        cache_ram_bytes=0,
        max_step_tokens=step,
    )


class Driver:
    """Numbers steps and remembers nothing else."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.number = 0

    def step(
        self,
        *rows: StepRow,
        positions: Sequence[LogitsPosition] = (),
        memory: Sequence[MemoryOp] = (),
        enter: Sequence[Enter] = (),
        leave: Sequence[int] = (),
        masks: Sequence[Mask] = (),
    ) -> StepResult:
        """Launch one plan and collect it."""
        self.number += 1
        self.runner.launch(
            StepPlan(
                number=self.number,
                rows=rows,
                positions=tuple(positions),
                memory=tuple(memory),
                enter=tuple(enter),
                leave=tuple(leave),
                masks=tuple(masks),
            )
        )
        return self.runner.collect()

    def prefill(
        self,
        tokens: Sequence[int],
        *,
        seq: int = 0,
        slot: int = 0,
        sampling: SamplingParams = GREEDY,
        start: int = 0,
        chunk: int = 0,
        memory: Sequence[MemoryOp] = (),
    ) -> StepResult:
        """Enter a sequence and compute it from `start` in chunks; the last step samples one token."""
        known = tuple(tokens)
        chunk = chunk or self.runner.capabilities.max_step_tokens
        enter: tuple[Enter, ...] = (Enter(seq, slot, known, len(known), sampling),)
        operations = tuple(memory)
        for begin in range(start, len(known), chunk):
            piece = known[begin : begin + chunk]
            last = begin + len(piece) == len(known)
            points = (LogitsPosition(0, len(piece) - 1, seq),) if last else ()
            row = StepRow(seq, slot, begin, piece)
            result = self.step(row, positions=points, enter=enter, memory=operations)
            enter, operations = (), ()
        return result

    def go_on(self, position: int, count: int, *, seq: int = 0, slot: int = 0) -> list[int]:
        """Sample `count` more tokens, one a step, from the last sampled one at `position`."""
        tokens = []
        for offset in range(count):
            row = StepRow(seq, slot, position + offset, LAST)
            result = self.step(row, positions=(LogitsPosition(0, 0, seq),))
            tokens.append(result.samples[0].token)
        return tokens


def with_logprobs(sampling: SamplingParams, top: int) -> SamplingParams:
    """The same sampling, with log probabilities."""
    return replace(sampling, top_logprobs=top)


Start = Callable[..., Driver]
"""The fixture `start`: model name and numbers -> a driver over a fresh runner."""


@contextmanager
def asking_to_abort(driver: Driver) -> Iterator[None]:
    """Another thread asks for an abort, over and over, while this is open."""
    done = threading.Event()

    def ask() -> None:
        while not done.wait(0.0005):
            driver.runner.abort()

    asker = threading.Thread(target=ask)
    asker.start()
    yield
    done.set()
    asker.join()
