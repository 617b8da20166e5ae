"""Plain data of waist 2: what goes to a runner in a step and what comes back.

Ints and tuples only, and differences only, so that a tensor-parallel runner can broadcast a plan. What every
step makes anew is a msgspec struct: frozen dataclasses took 12 µs a step to make, these take 1. The words
stand in backend.py, through which everything here is imported.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec


class _Last:
    """Stands for the token that the launched step samples: it may be on the device only."""

    def __repr__(self) -> str:
        return "LAST"


LAST = _Last()


# ---------------------------------------------------------------------------- memory operations


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the first `tokens` of one block into another (blocks books)."""

    src_block: int
    dst_block: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Alias:
    """Slot `dst`, empty before, shares the first `tokens` of slot `src` without a copy."""

    src: int
    dst: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Truncate:
    """Keep only the first `tokens` of a slot."""

    slot: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Empty a slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class Save:
    """Save the slot's state in RAM under `key`. The slot keeps it: a `Drop` follows where it should not."""

    slot: int
    key: int


@dataclass(frozen=True, slots=True)
class Restore:
    """Fill an empty slot from `key`, then keep its first `tokens`. The key stays saved."""

    key: int
    slot: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Discard:
    """Forget what is saved under `key`."""

    key: int


MemoryOp: TypeAlias = Copy | Alias | Truncate | Drop | Save | Restore | Discard


# ---------------------------------------------------------------------------- a step


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Resolved sampling of one sequence: nothing is None. Order and meaning: loop/sampling.py.

    `top_logprobs`: alternatives wanted per token; -1: no logprob at all.
    `seed`, `choice`: with the position and the token id they key the draw's noise.
    """

    temperature: float = 0.7
    top_k: int = 0
    typical_p: float = 1.0
    top_p: float = 0.95
    min_p: float = 0.05
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    choice: int = 0
    top_logprobs: int = -1

    @property
    def penalised(self) -> bool:
        """Whether the counts of earlier tokens matter."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )


class Enter(msgspec.Struct, frozen=True):
    """A sequence begins or comes back: all tokens known of it, how many of them are prompt, its sampling.
    From here on the runner follows the known tokens through the rows: a row's tokens overwrite from `start`.
    `slot` -1: a fork that samples from its parent's row in this plan and gets its slot with a later Enter."""

    seq: int
    slot: int
    tokens: tuple[int, ...]
    prompt_tokens: int
    sampling: SamplingParams


class StepRow(msgspec.Struct, frozen=True):
    """Compute `tokens` and then `drafts` of `seq` from position `start` in `slot`.

    `tokens`: known token ids, or LAST. `drafts`: guesses that follow them, in order; points on them are
    sampled until the first sampled token that differs from the draft behind it.
    `new_blocks`: blocks appended to the slot's block table (blocks books).
    """

    seq: int
    slot: int
    start: int
    tokens: tuple[int, ...] | _Last
    drafts: tuple[int, ...] = ()
    new_blocks: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """Tokens this row computes."""
        return (1 if isinstance(self.tokens, _Last) else len(self.tokens)) + len(self.drafts)


LogitsKind = Literal["sample", "prompt", "embedding"]


class LogitsPosition(msgspec.Struct, frozen=True):
    """Logits wanted at token `offset` (0 = first) of row number `row` of the plan.

    sample: draw the token at position `start + offset + 1` for sequence `seq` with its sampling (for a fork
    that is about to join, `seq` is the fork's own number, entered in the same plan).
    prompt: log probability of the known token `token` at that position, with `top` alternatives.
    embedding: the pooled vector.
    """

    row: int
    offset: int
    seq: int
    kind: LogitsKind = "sample"
    token: int = -1
    top: int = 0


class Mask(msgspec.Struct, frozen=True):
    """Allowed tokens for one sampled point, as `words`: bit t of the little-endian 32-bit words is token t,
    ceil(V / 32) of them. They may still be computed while the step runs: reading them waits, so read them
    when the point is sampled, not before."""

    index: int
    source: bytes | Callable[[], bytes]

    @property
    def words(self) -> bytes:
        return self.source if isinstance(self.source, bytes) else self.source()


class StepPlan(msgspec.Struct, frozen=True):
    """One step. Order of work: leave, memory, enter, rows, points.

    `pad_to`: compute at least so many tokens in all; the runner adds rows of its own scratch slot and
    throws them away (exact mode).
    """

    number: int
    rows: tuple[StepRow, ...] = ()
    positions: tuple[LogitsPosition, ...] = ()
    memory: tuple[MemoryOp, ...] = ()
    enter: tuple[Enter, ...] = ()
    leave: tuple[int, ...] = ()
    masks: tuple[Mask, ...] = ()
    pad_to: int = 0


class Sample(msgspec.Struct, frozen=True):
    """What came of one point. `logprob` is of the raw logits, None where none was asked."""

    index: int
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    embedding: tuple[float, ...] = ()


StepStatus = Literal["ok", "aborted", "out_of_memory"]


class StepResult(msgspec.Struct, frozen=True):
    """A step's outcome. It may come back short: points after a rejected draft are left out, and where
    `status` is not ok, `computed` says per row how many of its tokens hold valid KV (no samples then; memory
    operations, entries and block tables count all the same). A step launched behind one that comes back short
    is `aborted` and computes nothing.

    `earliest`: per row, the lowest position whose KV the slot still holds (0, or higher where a sliding
    window moved on). `elapsed_s`: the runner's own time. `notes`: what a user should know, in words.
    """

    number: int
    samples: tuple[Sample, ...]
    computed: tuple[int, ...]
    earliest: tuple[int, ...] = ()
    status: StepStatus = "ok"
    elapsed_s: float = 0.0
    notes: tuple[str, ...] = ()
