"""Waist 2: what the loop asks of a backend, and the plain data that goes to a runner and comes back.

The Protocols stand here, with their caller; llama.cpp and CUDA implement them without inheriting. A plan
is ints and tuples only and says differences, so that a tensor-parallel runner can broadcast it.

Words: a *sequence* (`seq`) is a logical text, numbered without reuse. A *slot* is a place in the runner's
state table and KV cache, `0 <= slot < Capabilities.max_slots`, reused. A *row* is one stretch of tokens of
one sequence in a step. A *point* is a position whose logits are wanted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypeAlias

from localchat.fit.plan import LoadWish, MemoryPlan


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
class Park:
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


MemoryOp: TypeAlias = Copy | Alias | Truncate | Drop | Park | Restore | Discard


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


@dataclass(frozen=True, slots=True)
class Enter:
    """A sequence begins or comes back: all tokens known of it, how many of them are prompt, its sampling.
    From here on the runner follows the known tokens through the rows: a row's tokens overwrite from `start`.
    `slot` -1: a fork that samples from its parent's row in this plan and gets its slot with a later Enter."""

    seq: int
    slot: int
    tokens: tuple[int, ...]
    prompt_tokens: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Row:
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


PointKind = Literal["sample", "prompt", "embedding"]


@dataclass(frozen=True, slots=True)
class Point:
    """Logits wanted at token `offset` (0 = first) of row number `row` of the plan.

    sample: draw the token at position `start + offset + 1` for sequence `seq` with its sampling (for a fork
    that is about to join, `seq` is the fork's own number, entered in the same plan).
    prompt: log probability of the known token `token` at that position, with `top` alternatives.
    embedding: the pooled vector.
    """

    row: int
    offset: int
    seq: int
    kind: PointKind = "sample"
    token: int = -1
    top: int = 0


@dataclass(frozen=True, slots=True)
class Mask:
    """Allowed tokens for one sampled point: bit t of the little-endian words is token t."""

    point: int
    words: bytes


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Order of work: leave, memory, enter, rows, points.

    `pad_to`: compute at least so many tokens in all; the runner adds rows of its own scratch slot and
    throws them away (exact mode).
    """

    number: int
    rows: tuple[Row, ...] = ()
    points: tuple[Point, ...] = ()
    memory: tuple[MemoryOp, ...] = ()
    enter: tuple[Enter, ...] = ()
    leave: tuple[int, ...] = ()
    masks: tuple[Mask, ...] = ()
    pad_to: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """What came of one point. `logprob` is of the raw logits, None where none was asked."""

    point: int
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    embedding: tuple[float, ...] = ()


StepStatus = Literal["ok", "aborted", "out_of_memory"]


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step's outcome. It may come back short: points after a rejected draft are left out, and where
    `status` is not ok, `computed` says per row how many of its tokens hold valid KV (no samples then).

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


# ---------------------------------------------------------------------------- what a model can do


class RowClass(NamedTuple):
    """Steps of `low` to `high` tokens in all compute bit-equal rows."""

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a loaded model can do, as data.

    rewind: `any` — a slot may be cut anywhere; `last_n` — a cut to position n counts only while the slot's
    `earliest <= max(0, n - rewind_tokens)` (sliding window); `checkpoint` — never, only whole saved states
    (recurrent and hybrid models): no drafts, prefix hits at checkpoints only.
    share: one slot's prefix can be aliased by another. depth: steps in flight, 1 or 2.
    kv_tokens: cells of the cache, all slots together. context_tokens: longest single sequence.
    block_tokens: page size, 0 where the cache is not paged. bytes_per_token: KV of one token.
    state_bytes: fixed part of a saved state (recurrent models). equal_rows: see RowClass.
    """

    context_tokens: int
    kv_tokens: int
    max_slots: int
    max_rows: int
    max_step_tokens: int
    depth: int = 1
    rewind: Literal["any", "last_n", "checkpoint"] = "any"
    rewind_tokens: int = 0
    share: bool = True
    splittable: bool = True
    block_tokens: int = 0
    bytes_per_token: int = 0
    state_bytes: int = 0
    equal_rows: tuple[RowClass, ...] = ()
    embeddings: bool = False
    kv_type: str = "f16"
    kv_types: tuple[str, ...] = ("f16",)
    step_target_s: float = 0.25
    limits: tuple[str, ...] = ()
    """What this model cannot do, in sentences for `show` and for why_missed."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the file says about itself. `sampling`: the model's own defaults, by Sampling field name."""

    name: str
    architecture: str
    quantization: str
    parameters: int
    context_train: int
    vocab_size: int
    file_bytes: int
    chat_template: str | None
    sampling: tuple[tuple[str, float], ...] = ()
    layers: int = 0
    identity: str = ""
    """Names the weights for prefix caches and fingerprints (sizes, header digest)."""


class MemoryReport(NamedTuple):
    """Bytes really taken, as the runner knows them; -1 where it cannot know."""

    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    other_bytes: int


class Tokenizer(Protocol):
    """Text to tokens and back. Callable from any thread, at any time, also while a step runs."""

    vocab_size: int
    bos: int
    eos: int
    eog: frozenset[int]
    """Every token that ends a generation."""
    add_bos: bool
    longest_piece: int
    """Bytes of the longest token: a text needs at least len(bytes) / longest_piece tokens."""

    def encode(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        """Token ids. `special`: control tokens written in the text are recognised. Lone surrogates and NUL
        are kept as the model's vocabulary allows; never raises for any str."""
        ...

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token; control tokens are empty unless `special`. ValueError out of range."""
        ...

    def special(self, name: str) -> int:
        """Id of `fim_pre`, `fim_suf`, `fim_mid`, `fim_pad`, `fim_rep`, `fim_sep`, `eot`, `sep`; -1: none."""
        ...


class Runner(Protocol):
    """Executes plans of one loaded model. `launch` and `collect` are called from one thread, first in first
    out, at most `capabilities.depth` steps ahead. Only `abort` may be called from another thread."""

    capabilities: Capabilities

    def launch(self, plan: StepPlan) -> None:
        """Begin a step. Raises only on a broken invariant; trouble with memory is a result."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest launched step."""
        ...

    def abort(self) -> None:
        """Ask the running step to end early; its result says what was computed. Best effort."""
        ...

    def memory(self) -> MemoryReport: ...

    def close(self) -> None:
        """Give everything back. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load. The plan has the numbers; the rest is the user's word.

    threads: 0 = physical cores. safe_mode: avoid what is known to crash here.
    max_slots: sequences at once. speculation: whether verify batches will come.
    """

    plan: MemoryPlan
    threads: int = 0
    safe_mode: bool = False
    max_slots: int = 16


Progress: TypeAlias = Callable[[int, int], bool]
"""(done_bytes, total_bytes) -> go on? False makes the load raise EngineClosed."""


class OpenModel(Protocol):
    """A model whose vocabulary and header are read and whose weights are not: answers tokenize and render
    at once, and can refuse a request before the load."""

    info: ModelInfo
    tokenizer: Tokenizer

    def plan(self, wish: LoadWish) -> MemoryPlan:
        """What a load would take now. Raises DoesNotFit with advice when nothing fits."""
        ...

    def load(self, options: LoadOptions, progress: Progress, say: Callable[[str], None]) -> Runner:
        """Read the weights and warm up. `say` takes sentences for the user. Raises ModelInvalid,
        DoesNotFit."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a backend can run here. `reason` and `hint` are sentences; `versions` go into fingerprints."""

    ok: bool
    reason: str
    hint: str = ""
    versions: tuple[tuple[str, str], ...] = field(default=())


class Backend(Protocol):
    """Found through the entry-point group `localchat.backends`; made without arguments."""

    name: str

    def build_key(self) -> str:
        """Names the native build and this CPU (library file, size, date; CPU model): what safe mode is
        remembered by. Empty where there is nothing native that could crash."""
        ...

    def available(self) -> Availability:
        """Answers without importing anything heavy."""
        ...

    def accepts(self, path: Path) -> bool:
        """Whether this backend is for the file or folder at `path`, by its header or name."""
        ...

    def open(self, path: Path, say: Callable[[str], None]) -> OpenModel:
        """Read header and vocabulary. Raises ModelMissing, ModelInvalid."""
        ...


Tokens: TypeAlias = Sequence[int]
