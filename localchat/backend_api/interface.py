"""Interface that the engine core calls: Backend, OpenModel, Runner, Tokenizer and their records.

A backend inherits the defaults of Backend, and implements the Protocols without inheriting from them. A plan
contains only ints and tuples, and only changes, so that a tensor-parallel runner can broadcast it.

Terms: a *sequence* (`seq`) is a logical text. Its number is never reused. A *slot* is an entry of the runner's
state table and KV cache, `0 <= slot < Capabilities.max_slots`, and is reused. A *row* is a range of tokens of
one sequence in a step.
"""

from abc import ABC, abstractmethod  # noqa: I001 - isort would give each re-export a statement
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypeAlias

from localchat.backend_api.special_tokens import SpecialToken
from localchat.backend_api.step import (
    LAST as LAST,
    Alias as Alias,
    Copy as Copy,
    Discard as Discard,
    Drop as Drop,
    Enter as Enter,
    Import as Import,
    LoadBlock as LoadBlock,
    LogitsPosition as LogitsPosition,
    Mask as Mask,
    MemoryOp as MemoryOp,
    NewBlocks as NewBlocks,
    Restore as Restore,
    Sample as Sample,
    SamplingParams as SamplingParams,
    Save as Save,
    SaveBlock as SaveBlock,
    StateRange as StateRange,
    StepPlan as StepPlan,
    StepResult as StepResult,
    StepRow as StepRow,
    StepStatus as StepStatus,
    Truncate as Truncate,
)
from localchat.errors import LocalchatError
from localchat.fit.hardware import Machine
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat.fit.report import Kind
from localchat.fit.speed import Estimate
from localchat.model_files.checkpoint import ModelSummary


class Widths(NamedTuple):
    """Row counts that a runner pads its steps to, or that fill its tiles, ascending."""

    prefill: tuple[int, ...] = ()
    """Widths of a step with prompts only."""
    mixed_decode: tuple[int, ...] = ()
    """Widths of the decode rows in a step with prompts."""
    mixed: tuple[int, ...] = ()
    """Total widths of a step with prompts and decode rows."""
    decode: tuple[int, ...] = ()
    """Widths of a step that only decodes, drafts included."""

    def padded(self, decode: int, prompts: int) -> "PaddedWidth":
        """Return the padded width of a step. A step wider than all widths is not padded."""
        decode = next((width for width in self.mixed_decode if decode <= width), decode)
        total = decode + prompts
        widths = self.mixed if decode else self.prefill
        return PaddedWidth(decode, next((width for width in widths if total <= width), total))


class PaddedWidth(NamedTuple):
    """Rows of a step with prompts, as a runner computes it."""

    decode: int
    """Rows of sequences that decode."""
    total: int


_ANY_WIDTH = Widths()
_SLOW_STEP_S = 0.25
_EXACT_CHUNK_SLOW = 64
_EXACT_CHUNK_FAST = 512


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Static properties of a loaded model that the scheduler relies on.

    Size: capabilities are data, so each difference between runners is a field.
    """

    context_tokens: int
    """Longest single sequence."""
    kv_tokens: int
    """Cells of the cache for all slots together."""
    max_slots: int
    max_rows: int
    max_step_tokens: int
    depth: int = 1
    """Steps in flight: 1 or 2."""
    rewind: Literal["any", "last_n", "checkpoint"] = "any"
    """Positions to which a slot may be truncated. `any`: all. `last_n`: to position n while the slot's
    `earliest <= max(0, n - rewind_tokens)` (sliding window). `checkpoint`: none, because only whole states can
    be restored or aliased (recurrent and hybrid models). Then prefixes hit only at checkpoints, and drafts
    need slots beyond `max_rows` for the states before them."""
    rewind_tokens: int = 0
    block_tokens: int = 0
    """Page size. 0: the cache is not paged."""
    window_tokens: int = 0
    """Keys that a query sees in windowed layers with blocks of their own. 0: no such layers."""
    window_blocks: int = 0
    """Number of blocks of the windowed layers. `kv_tokens` counts the others."""
    host_blocks: int = 0
    """Number of host blocks of a paged cache. With any, the runner is a HostBlockRunner."""
    host_block_s: float = 0.0
    """Measured time of loading a host block. 0: negligible."""
    host_layout: str = ""
    """Name of the layout of a host block. KV of another layout is never loaded."""
    bytes_per_token: int = 0
    """KV bytes of one token."""
    state_bytes: int = 0
    """Fixed part of a saved state (recurrent models)."""
    saved_states: int = 0
    """Number of states that device memory can hold, in a paged cache with `checkpoint`."""
    state_interval_tokens: int = 0
    """Interval at which states of a prompt are saved, with `checkpoint`. 0: only near its end."""
    exports: Literal["", "range", "whole"] = ""
    """Parts of a slot that can be exported from the process (ExportingRunner): any range, the whole state, or
    none."""
    draft_model: bool = False
    """True if the runner is a DraftingRunner (drafter.py)."""
    all_logprobs: bool = False
    """True if a prompt position can return the log probabilities of all tokens."""
    kv_type: str = "f16"
    kv_types: tuple[str, ...] = ("f16",)
    step_target_s: float = 0.25
    """Longest step."""
    seeds_run_alone: bool = False
    """Seeded requests share no step with others. Neighbors change the bits of their rows, and a step of several
    sequences gains little here."""
    draft_rows: int = 32
    """Limit of running sequences for drafts. With more, the rows of a step fill the machine, and a search for
    drafts would cost more than they save."""
    draft_step_tokens: int = 1 << 30
    """Token limit of a step with drafts. Wider steps are too rare to be prepared."""
    row_cost: float = 0.15
    """Assumed cost of each further row, relative to a step of one row.

    Steps replace it by what they measure. If it is too low, the first drafts after a load are too long."""
    moves_rows: bool = False
    """Plans may repeat the rows of an earlier plan, each some tokens further on (StepPlan.moved)."""
    prepares_steps: bool = False
    """Steps are slow until their kind was prepared. The runner is a PreparingRunner."""
    shared_step_target_s: float = 0.0
    """Longest step with a prompt while other sequences decode. 0: the same as `step_target_s`."""
    widths: Widths = _ANY_WIDTH
    """Padded widths. Empty: steps are not padded."""
    exact_widths: tuple[int, ...] = ()
    """Multiples of `exact_chunk_tokens`: prompt steps of these widths compute the same bits as steps of one
    chunk each."""
    limits: tuple[str, ...] = ()
    """Limitations of this model, as sentences for `show` and for cache misses."""

    @property
    def exact_chunk_tokens(self) -> int:
        """Tokens of a prompt chunk whose shape is the same cold and warm.

        Kernels choose tiles and tails by the number of rows, so a row has the same bits again only in a chunk
        of the same shape, or in a step of `exact_widths`. Wider chunks cost a GPU less, and recompute more of a
        cached prompt.
        """
        chunk = _EXACT_CHUNK_FAST
        if self.step_target_s >= _SLOW_STEP_S:
            chunk = max((_EXACT_CHUNK_SLOW, *self.widths.prefill[:1]))
        return min(chunk, self.max_step_tokens)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Description of a model, from its file."""

    name: str
    architecture: str
    quantization: str
    parameters: int
    context_train: int
    vocab_size: int
    file_bytes: int
    chat_template: str | None
    sampling: tuple[tuple[str, float], ...] = ()
    """The model's own defaults by Sampling field name."""
    layers: int = 0
    pooling: str = ""
    """Pooling of token vectors into an embedding (`mean`, `cls`, `last`). The open model is then an
    EmbeddingModel. Empty: the model generates text."""
    media: tuple[str, ...] = ()
    """Kinds of attachments that the model reads, `image` and `audio`. With any, the open model is a MediaModel
    (media.py)."""
    encoder: str = ""
    """Identifies the file that reads attachments. Empty: none."""
    adapters: tuple[tuple[str, float], ...] = ()
    """Identity and default scale of each LoRA adapter."""
    identity: str = ""
    """Identifies the weights for prefix caches and fingerprints (sizes, header digest)."""


class MemoryReport(NamedTuple):
    """Allocated bytes, as reported by the runner. -1: unknown."""

    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    other_bytes: int


class Tokenizer(Protocol):
    """Converts text to tokens and back. Any thread may call it, even while a step runs."""

    vocab_size: int
    bos: int
    eos: int
    eog: frozenset[int]
    """Every token that ends a generation."""
    add_bos: bool
    longest_piece: int
    """Bytes of the longest token. A text has at least len(bytes) / longest_piece tokens."""

    @property
    def special_tokens(self) -> Sequence[SpecialToken]:
        """Control and user-defined tokens, computed at the first use."""

    def encode(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        """Return the token ids of a text. Keeps lone surrogates and NUL if the vocabulary can. Never raises.

        `special`: recognize control tokens in the text.
        """
        ...

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of a token, empty for control tokens unless `special`. Raises ValueError."""
        ...

    def special(self, name: str) -> int:
        """Return the id of `fim_pre`, `fim_suf`, `fim_mid`, `fim_pad`, `fim_rep`, `fim_sep`, `eot` or `sep`.

        -1: none.
        """
        ...


class Runner(Protocol):
    """Executes the plans of one loaded model.

    One thread calls `launch` and `collect`, first in first out, with at most `capabilities.depth` steps in
    flight. Only `abort` may be called from another thread.
    """

    capabilities: Capabilities

    def launch(self, plan: StepPlan) -> None:
        """Start a step. Raises DeviceFault, and on a broken invariant. Lack of memory is a result."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest launched step. Raises DeviceFault."""
        ...

    def abort(self) -> None:
        """End the running step early. Its result has what was computed. Best effort."""
        ...

    def warm_up_next(self) -> bool:
        """Do a part of the warm-up while no step is in flight.

        Returns False if nothing is left to do. Raises DeviceFault.
        """
        ...

    def memory(self) -> MemoryReport: ...

    def close(self) -> None:
        """Release everything. Idempotent."""
        ...


class LoadRequest(NamedTuple):
    """Load of a model: its plan and the requested options."""

    plan: MemoryPlan
    options: LoadOptions
    safe_mode: bool = False
    """Avoid features that are known to crash here."""


Progress: TypeAlias = Callable[[int, int], bool]
"""(done_bytes, total_bytes) -> continue? False makes the load raise EngineClosed."""


class OpenModel(Protocol):
    """A model whose header and vocabulary are read, without its weights.

    It can tokenize at once, so that requests can be prepared or rejected before the load.
    """

    info: ModelInfo
    tokenizer: Tokenizer

    def plan(self, options: LoadOptions) -> MemoryPlan:
        """Plan a load on this machine now. Raises DoesNotFit with advice."""
        ...

    def load(
        self, request: LoadRequest, progress: Progress, notify: Callable[[str], None]
    ) -> Runner:
        """Load the weights and warm up. Raises ModelInvalid, DoesNotFit, DeviceFault.

        `notify`: shows a notice to the user.
        """
        ...

    def close(self) -> None: ...


class Embedder(Protocol):
    """A loaded embedding model. Used from one thread, apart from `abort`.

    Only llama.cpp has one so far. It is a Protocol because the core does not import backends.
    """

    context_tokens: int
    """Token limit of one text."""

    def embed(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return a unit vector for each text.

        Texts have 1 to `context_tokens` tokens.

        Raises EngineClosed after `abort`.
        """
        ...

    def abort(self) -> None:
        """End `embed` soon. From any thread."""
        ...

    def memory(self) -> MemoryReport: ...

    def close(self) -> None:
        """Release everything. Idempotent."""
        ...


class EmbeddingModel(Protocol):
    """Additional methods of an open model with pooling."""

    def text_tokens(self, text: str) -> list[int]:
        """Return the tokens of a text, with start and end tokens. From any thread."""
        ...

    def load_embedder(
        self, request: LoadRequest, progress: Progress, notify: Callable[[str], None]
    ) -> Embedder:
        """See OpenModel.load."""
        ...


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a backend can run here."""

    ok: bool
    reason: str
    """Reason, as a sentence."""
    hint: str = ""
    """Advice, as sentences."""
    versions: tuple[tuple[str, str], ...] = ()
    """Library versions that affect the text. They are part of fingerprints."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device that a backend's library found."""

    name: str
    description: str
    kind: str
    """`cpu`, `gpu`, `igpu` or `accel`."""
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class BuildInfo:
    """Build of a backend's library."""

    library: str
    """File or name of the library."""
    version: str
    features: frozenset[str]
    """Instruction sets or compute capabilities."""
    offload: bool
    """Whether the library can put layers on a GPU."""
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True)
class Remedy:
    """Action with which a user can get a better build."""

    sentence: str
    rebuild: str = ""
    """Kind of build for `Rebuilder.rebuild`. Empty: no build helps."""


@dataclass(frozen=True, slots=True)
class RebuildOffer:
    """A build of the backend's library that would be better for this machine."""

    kind: str
    gain: str
    """Benefit of the build, as the end of a sentence about it."""
    missing: str = ""
    """Missing requirements, as a sentence. Empty: none."""


@dataclass(frozen=True, slots=True)
class RebuildOutcome:
    """End of a rebuild."""

    installed: bool
    """Whether the new library is in use from now on."""
    sentence: str
    """Reason, as the end of a sentence."""


class Rebuilder(Protocol):
    """Builds a backend's library for this machine, and installs it if it is correct."""

    @property
    def kinds(self) -> Sequence[str]:
        """Kinds of builds, by the device that they compute on."""
        ...

    def offer(self) -> RebuildOffer | None:
        """Return the build that would help most. None: no build is needed. Loads no library."""
        ...

    def rebuild(self, kind: str) -> RebuildOutcome:
        """Build the library, test it, and install it if it is correct.

        Blocks for minutes, and prints to stderr. An interrupt changes nothing and leaves no process behind.
        Raises LocalchatError if the build fails, and OSError.
        """
        ...

    def undo(self) -> bool:
        """Remove the installed build. Return False if none is installed."""
        ...


class Quantizer(Protocol):
    """Writes GGUF files and checkpoints as GGUF in other quantizations."""

    @property
    def names(self) -> Sequence[str]:
        """Quantizations that it writes, such as Q4_K_M. Finest first."""
        ...

    def size_bytes(self, source: Path, quantization: str) -> int:
        """Return the bytes of the tensors that `write` would write. Raises LocalchatError."""
        ...

    def write(
        self,
        source: Path,
        target: Path,
        quantization: str,
        threads: int,
        report: Callable[[int, int], None],
    ) -> None:
        """Write a model to a new file. An interrupt or an error leaves no partial file behind.

        `report` gets the bytes read so far and in all. Raises LocalchatError, OSError.
        """
        ...


class Backend(ABC):
    """Interface to one way of running models. Found by the entry-point group `localchat.backends`.

    Created without arguments. A method that is not abstract has the answer of a backend without that ability.

    `plan`, `objection` and `expected_rate` take the header of a model whose file is one of `kinds`. Only
    `open`, `build_info` and `remedies` may load a native library.
    """

    name: str
    kinds: tuple[Kind, ...] = ()
    """Kinds of files that the backend runs, in order of preference."""

    @abstractmethod
    def available(self) -> Availability:
        """Return whether the backend can run here. Imports nothing heavy."""

    @abstractmethod
    def accepts(self, path: Path) -> bool:
        """Return whether the backend runs `path`, a file or folder, by its first bytes or name."""

    @abstractmethod
    def open(self, path: Path, notify: Callable[[str], None]) -> OpenModel:
        """Read header and vocabulary. Raises ModelMissing, ModelInvalid."""

    def build_key(self) -> str:
        """Return a name of the native build and this CPU.

        Safe mode is stored by this key. Empty if there is no native code that could crash.
        """
        return ""

    def objection(self, model: ModelSummary) -> str:
        """Return why this build cannot run a model, as the end of a sentence. Empty: it can."""
        return ""

    def with_gpus(self, machine: Machine) -> Machine:
        """Return the machine with the GPUs that only this build can find. May take a second."""
        return machine

    def plan(self, model: ModelSummary, options: LoadOptions, machine: Machine) -> MemoryPlan:
        """Plan the memory of a load on this machine, even if it does not fit.

        Raises UsageError for options that this model does not support.
        """
        raise LocalchatError("this backend can plan a load only after the model is open")

    def expected_rate(self, model: ModelSummary, plan: MemoryPlan, threads: int) -> Estimate | None:
        """Predict the tok/s of one request with a short context on an idle machine.

        The estimate is a range. threads: 0 for every physical core. Takes less than a second. None if the
        backend cannot tell.
        """
        return None

    def build_info(self) -> BuildInfo:
        """Return the build of the library. Raises LocalchatError, ImportError, OSError."""
        return BuildInfo("", "", frozenset(), offload=False, devices=())

    def remedies(self) -> tuple[Remedy, ...]:
        """Return ways to a better build, such as a rebuild for an unused GPU. Best first."""
        return ()

    def rebuilder(self) -> Rebuilder | None:
        """Return the rebuilder of the library. None: users cannot build it."""
        return None

    def quantizer(self) -> Quantizer | None:
        """Return the quantizer of the library. None: it writes no models."""
        return None
