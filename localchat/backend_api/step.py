"""Plan and result of one step, as plain data.

Ints and tuples only, and differences only, so that a tensor-parallel runner can broadcast a plan. Records
made anew in every step are msgspec structs: frozen dataclasses took 12 µs a step to make, these take 1.
`interface.py` defines the terms and exports everything here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import msgspec


class _Last:
    """The token that the launched step samples: it may be on the device only."""

    def __repr__(self) -> str:
        return "LAST"


LAST = _Last()


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the first `tokens` of one block into another (paged caches)."""

    src_block: int
    dst_block: int
    tokens: int
    window: bool = False
    """Of the windowed layers' blocks (Capabilities.window_blocks)."""


@dataclass(frozen=True, slots=True)
class Alias:
    """Share the first `tokens` of slot `src` with the empty slot `dst`, without a copy. Of a paged cache: give
    it a copy of the state, which is of `tokens` tokens."""

    src: int
    dst: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Truncate:
    """Keep only the first `tokens` of a slot. It may have fewer, where a step in flight came back short."""

    slot: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Empty a slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class Save:
    """Save a slot's state under `key`: in host memory, of a paged cache in the device's. The slot keeps it; a
    `Drop` may follow."""

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
    """Delete the state saved under `key`."""

    key: int


class StateRange(NamedTuple):
    """KV of the tokens from `start` to `end` of a text, as a runner exported it."""

    start: int
    end: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class Import:
    """Save in host memory under `key` what was exported from a runner of this kind: ranges that follow each
    other from position 0 (Capabilities.exports)."""

    key: int
    ranges: tuple[StateRange, ...]


@dataclass(frozen=True, slots=True)
class SaveBlock:
    """Copy a full block to `host_block` in host memory, over what that held (paged caches)."""

    block: int
    host_block: int


@dataclass(frozen=True, slots=True)
class LoadBlock:
    """Copy `host_block` from host memory to a block. The host block stays."""

    host_block: int
    block: int


MemoryOp: TypeAlias = (
    Copy | Alias | Truncate | Drop | Save | Restore | Discard | Import | SaveBlock | LoadBlock
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Resolved sampling parameters of one sequence: none is None. Semantics: sampling/reference.py."""

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
    """`seed` and `choice`, with the position and the token id, key the noise of the draw."""
    choice: int = 0
    top_logprobs: int = -1
    """Alternatives per token; -1: no log probability at all."""

    @property
    def penalised(self) -> bool:
        """True if the counts of earlier tokens matter."""
        return (
            self.repetition_penalty != 1.0
            or self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
        )


class Enter(msgspec.Struct, frozen=True):
    """A sequence that begins or comes back.

    From here on the runner follows its known tokens through the rows: a row's tokens overwrite from `start`.
    """

    seq: int
    slot: int
    """-1: a fork that samples from its parent's row in this plan and gets its slot with a later Enter."""
    tokens: tuple[int, ...]
    """All known tokens."""
    prompt_tokens: int
    """How many of them are prompt."""
    sampling: SamplingParams
    offset: int = 0
    """Tokens of the text before the first one here, as far as the noise of its draws counts them: a draft
    model may know only the end of a text."""


class StepRow(msgspec.Struct, frozen=True):
    """Compute `tokens` and then `drafts` of `seq` from position `start` in `slot`."""

    seq: int
    slot: int
    start: int
    tokens: tuple[int, ...] | _Last
    """Known token ids, or LAST."""
    drafts: tuple[int, ...] = ()
    """Draft tokens after them. They are sampled until the first sampled token that differs from its draft."""
    new_blocks: tuple[int, ...] = ()
    """Blocks appended to the slot's block table (paged caches)."""
    new_window_blocks: tuple[int, ...] = ()
    """The same of the windowed layers' block table. A block that no later row of the slot can see may have been
    given back: the table names it still, or a number that was never its own."""

    @property
    def width(self) -> int:
        """Tokens this row computes."""
        return (1 if isinstance(self.tokens, _Last) else len(self.tokens)) + len(self.drafts)


LogitsKind = Literal["sample", "prompt", "embedding"]


class LogitsPosition(msgspec.Struct, frozen=True):
    """A position whose logits a plan asks for: token `offset` (0 = first) of row number `row`."""

    row: int
    offset: int
    seq: int
    """For a fork that is about to join: the fork's own number, entered in the same plan."""
    kind: LogitsKind = "sample"
    """`sample`: draw the token at position `start + offset + 1` for `seq` with its sampling. `prompt`: log
    probability of the known token `token` at that position, with `top` alternatives. `embedding`: the
    pooled vector."""
    token: int = -1
    top: int = 0
    all: bool = False
    """The log probabilities of all tokens too, where Capabilities.all_logprobs says so."""


class Mask(msgspec.Struct, frozen=True):
    """Tokens that one sampled position allows."""

    index: int
    """Number of the LogitsPosition in the plan."""
    source: bytes | Callable[[], bytes]
    """The words, or a function that waits for them: they may be computed while the step runs, so read them
    only when the position is sampled."""

    @property
    def words(self) -> bytes:
        """Little-endian 32-bit words, ceil(V / 32) of them; bit t is token t."""
        if isinstance(self.source, bytes):
            return self.source
        return self.source()


class StepPlan(msgspec.Struct, frozen=True):
    """One step. Order of work: leave, memory, enter, rows, positions."""

    number: int
    rows: tuple[StepRow, ...] = ()
    positions: tuple[LogitsPosition, ...] = ()
    memory: tuple[MemoryOp, ...] = ()
    enter: tuple[Enter, ...] = ()
    leave: tuple[int, ...] = ()
    masks: tuple[Mask, ...] = ()


class Sample(msgspec.Struct, frozen=True):
    """Result of one LogitsPosition."""

    index: int
    """Its number in the plan."""
    token: int
    logprob: float | None = None
    """Of the raw logits; None if not requested."""
    top: tuple[tuple[int, float], ...] = ()
    all: bytes = b""
    """The log probabilities of all tokens, little-endian float16."""
    embedding: tuple[float, ...] = ()


StepStatus = Literal["ok", "aborted", "out_of_memory"]


class StepResult(msgspec.Struct, frozen=True):
    """Outcome of a step. It may come back short.

    Positions after a rejected draft are left out. Where `status` is not ok there are no samples, but memory
    operations, entries and block tables count all the same. A step launched after one that comes back short
    is `aborted` and computes nothing.
    """

    number: int
    samples: tuple[Sample, ...]
    computed: tuple[int, ...]
    """Per row, how many of its tokens hold valid KV."""
    earliest: tuple[int, ...] = ()
    """Per row, the lowest position whose KV the slot still holds (above 0 where a sliding window moved on)."""
    status: StepStatus = "ok"
    elapsed_s: float = 0.0
    """The runner's own time."""
    notes: tuple[str, ...] = ()
    """Sentences for the user."""
    lost_slots: tuple[int, ...] = ()
    """Where `status` is not ok: slots that an `Alias` or a `Restore` found no room for. They are empty, and
    stay so until they are dropped."""
