"""Plan and result of one step, as plain data.

Plans contain only ints and tuples, and only differences, so that a tensor-parallel runner can broadcast them.
Records that every step creates are msgspec structs, because frozen dataclasses took 12 µs per step instead of
1. `interface.py` defines the terms and exports everything here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from localchat.backend_api.media import MediaSpan
from localchat.config.parameters import SAMPLERS
from localchat.config.sampling import SamplingValues


class _Last:
    """The token that the launched step samples. It may still be on the device."""

    def __repr__(self) -> str:
        return "LAST"

    def __reduce__(self) -> str:
        # Unpickle to the one object that runners compare with.
        return "LAST"


LAST = _Last()


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the first `tokens` of one block into another (paged caches)."""

    src_block: int
    dst_block: int
    tokens: int
    window: bool = False
    """The blocks belong to the windowed layers (Capabilities.window_blocks)."""


@dataclass(frozen=True, slots=True)
class Alias:
    """Share the first `tokens` of slot `src` with the empty slot `dst`, without a copy.

    In a paged cache, copy the state of `tokens` tokens to `dst`.
    """

    src: int
    dst: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Truncate:
    """Keep only the first `tokens` of a slot. It may have fewer after a short step."""

    slot: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Empty a slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class Save:
    """Save a slot's state under `key`.

    It goes to host memory, or to device memory for a paged cache. The slot keeps its state. A `Drop` may
    follow.
    """

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
    """KV of the tokens from `start` to `end`, as a runner exported it."""

    start: int
    end: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class Import:
    """Save exported ranges in host memory under `key`. They are contiguous from position 0."""

    key: int
    ranges: tuple[StateRange, ...]


@dataclass(frozen=True, slots=True)
class SaveBlock:
    """Copy a full block to `host_block` in host memory, and overwrite that (paged caches)."""

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


_PENALTIES: Final = {key: row.off for key, row in SAMPLERS.items() if row.reads_text}
_RARE: Final = {key: row.off for key, row in SAMPLERS.items() if row.rare}
"""Values without effect of the numbers that turn on penalties and rare samplers."""


@dataclass(frozen=True, slots=True)
class SamplingParams(SamplingValues):
    """Resolved sampling parameters of one sequence. See sampling/reference.py."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    """Key of the noise, together with the choice, the position and the token id."""
    choice: int = 0
    dry_breakers: bytes = field(default=b"", repr=False)
    """Tokens across which DRY sees no repetition: bit t of the little-endian bits is token t."""
    top_logprobs: int = -1
    """Alternatives per token. -1: no log probabilities."""
    penalised: bool = field(init=False)
    """True if the earlier tokens matter."""
    rare: bool = field(init=False)
    """True if a sampler with `SamplingNumber.rare` is on."""

    def __post_init__(self) -> None:
        # Every draw reads them.
        object.__setattr__(self, "penalised", self._uses(_PENALTIES))
        object.__setattr__(self, "rare", self._uses(_RARE))

    def _uses(self, off: Mapping[str, float]) -> bool:
        return any(getattr(self, key) != value for key, value in off.items())

    def for_drafts(self, top_logprobs: int) -> "SamplingParams":
        """Return the same sampling without penalties, because a draft model does not count tokens."""
        return replace(self, **_PENALTIES, top_logprobs=top_logprobs)  # type: ignore[arg-type]


class Enter(msgspec.Struct, frozen=True):
    """A sequence that enters the runner, for the first time or again.

    The runner then follows its known tokens through the rows. A row's tokens overwrite from `start`.
    """

    seq: int
    slot: int
    """-1: a fork that samples from its parent's row and gets its slot with a later Enter."""
    tokens: tuple[int, ...]
    """All known tokens."""
    prompt_tokens: int
    """Number of prompt tokens among them."""
    sampling: SamplingParams
    offset: int = 0
    """Tokens of the text before the first one here. The noise of the draws counts them, but a draft model may
    know only the end of a text."""
    media: tuple[MediaSpan, ...] = ()
    """Pictures and recordings among the tokens, in order. Their token ids are placeholders (media.py)."""
    adapters: tuple[float, ...] = ()
    """Scale of each LoRA adapter of the load. Empty: none applies."""


class StepRow(msgspec.Struct, frozen=True):
    """Compute `tokens` and then `drafts` of `seq` from position `start` in `slot`."""

    seq: int
    slot: int
    start: int
    tokens: tuple[int, ...] | _Last
    """Known token ids, or LAST."""
    drafts: tuple[int, ...] = ()
    """Draft tokens. Positions are sampled up to the first token that differs from its draft."""
    new_blocks: tuple[int, ...] = ()
    """Blocks appended to the slot's block table (paged caches)."""
    new_window_blocks: tuple[int, ...] = ()
    """Blocks appended to the block table of the windowed layers. A block that no later row of the slot can see
    may have been released. Its table entry is then invalid."""

    @property
    def width(self) -> int:
        """Tokens this row computes."""
        if isinstance(self.tokens, _Last):
            return 1 + len(self.drafts)
        return len(self.tokens) + len(self.drafts)


class LogitsPosition(msgspec.Struct, frozen=True):
    """A position whose logits a plan requests: token `offset` of row number `row`."""

    row: int
    offset: int
    seq: int
    """Number of the sequence, or of a fork that enters with the same plan."""
    kind: Literal["sample", "prompt"] = "sample"
    """`sample`: draw the token at position `start + offset + 1` for `seq` with its sampling. `prompt`: log
    probability of the known token `token` at that position, with `top` alternatives."""
    token: int = -1
    top: int = 0
    all: bool = False
    """Return the log probabilities of all tokens too, if Capabilities.all_logprobs."""


class Mask(msgspec.Struct, frozen=True):
    """Tokens that one sampled position allows."""

    index: int
    """Number of the LogitsPosition in the plan."""
    source: bytes | Callable[[], bytes]
    """The words, or a function that waits for them. They may be computed while the step runs, so read them
    only when the position is sampled."""

    @property
    def words(self) -> bytes:
        """Little-endian 32-bit words (ceil(V / 32),). Bit t is token t."""
        if isinstance(self.source, bytes):
            return self.source
        return self.source()


class NewBlocks(NamedTuple):
    """Blocks appended to the block table of a slot (paged caches)."""

    row: int
    """Number of the row in the plan."""
    blocks: tuple[int, ...]


class StepPlan(msgspec.Struct, frozen=True):
    """Plan of a step. Order of work: leave, memory, enter, rows, positions."""

    number: int
    rows: tuple[StepRow, ...] = ()
    positions: tuple[LogitsPosition, ...] = ()
    memory: tuple[MemoryOp, ...] = ()
    enter: tuple[Enter, ...] = ()
    leave: tuple[int, ...] = ()
    masks: tuple[Mask, ...] = ()
    exact: bool = False
    """A row must have the bits of the same step in a fresh engine, so all threads of the runner compute."""
    moved: int = 0
    """Number of tokens by which the rows of an earlier plan moved on. 0: the rows are new.

    `rows` and `positions` then are the earlier ones, and each row computes LAST from `start + moved` on. The
    result has `tokens`. Requires Capabilities.moves_rows."""
    new_blocks: tuple[NewBlocks, ...] = ()
    """New blocks of moved rows. Those in `rows` were appended by the earlier plan."""

    def unmoved(self) -> "StepPlan":
        """Return the same plan with rows of its own."""
        if not self.moved:
            return self
        new = dict(self.new_blocks)
        rows = tuple(
            StepRow(row.seq, row.slot, row.start + self.moved, LAST, (), new.get(number, ()))
            for number, row in enumerate(self.rows)
        )
        return msgspec.structs.replace(self, rows=rows, moved=0, new_blocks=())


class Sample(msgspec.Struct, frozen=True):
    """Result of one LogitsPosition."""

    index: int
    """Number of the position in the plan."""
    token: int
    logprob: float | None = None
    """Log probability from the raw logits. None if not requested."""
    top: tuple[tuple[int, float], ...] = ()
    all: bytes = b""
    """The log probabilities of all tokens, little-endian float16."""


StepStatus = Literal["ok", "aborted", "out_of_memory"]


class StepResult(msgspec.Struct, frozen=True):
    """Outcome of a step, which may be short.

    Positions after a rejected draft are omitted. If `status` is not ok, there are no samples, but memory
    operations, entries and block tables still apply. A step launched after a short one is `aborted` and
    computes nothing.
    """

    number: int
    samples: tuple[Sample, ...]
    computed: tuple[int, ...]
    """Number of tokens with valid KV, by row."""
    earliest: tuple[int, ...] = ()
    """Lowest position in the slot, by row. Above 0 if a sliding window moved on."""
    status: StepStatus = "ok"
    elapsed_s: float = 0.0
    """Time of the step, as measured by the runner."""
    notes: tuple[str, ...] = ()
    """Notices for the user."""
    tokens: tuple[int, ...] = ()
    """Sampled token of each row, in place of `samples`, if the plan's rows are moved."""
    lost_slots: tuple[int, ...] = ()
    """Slots that `Alias` or `Restore` could not fill, if `status` is not ok. They stay empty until dropped."""
