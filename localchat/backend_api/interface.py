"""Interface that the engine core calls: Backend, OpenModel, Runner, Tokenizer and their records.

llama.cpp and CUDA implement these Protocols without inheriting from them. A plan holds ints and tuples only,
and only what changes, so that a tensor-parallel runner can broadcast it.

Terms: a *sequence* (`seq`) is a logical text, numbered without reuse. A *slot* is a place in the runner's
state table and KV cache, `0 <= slot < Capabilities.max_slots`, reused. A *row* is one stretch of tokens of
one sequence in a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, TypeAlias

from localchat.backend_api.special_tokens import SpecialToken
from localchat.backend_api.step import (
    LAST,
    Alias,
    Copy,
    Discard,
    Drop,
    Enter,
    Import,
    LoadBlock,
    LogitsKind,
    LogitsPosition,
    Mask,
    MemoryOp,
    Restore,
    Sample,
    SamplingParams,
    Save,
    SaveBlock,
    StateRange,
    StepPlan,
    StepResult,
    StepRow,
    StepStatus,
    Truncate,
)
from localchat.errors import LocalchatError
from localchat.fit.hardware import Machine
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat.fit.report import Kind
from localchat.fit.speed import Estimate, PastRun
from localchat.model_files.checkpoint import ModelSummary

__all__ = [
    "LAST",
    "Alias",
    "Availability",
    "Backend",
    "BuildInfo",
    "Capabilities",
    "Copy",
    "Device",
    "Discard",
    "Drop",
    "Embedder",
    "EmbeddingModel",
    "Enter",
    "Import",
    "LoadBlock",
    "LoadRequest",
    "LogitsKind",
    "LogitsPosition",
    "Mask",
    "MemoryOp",
    "MemoryReport",
    "MinimalBackend",
    "ModelInfo",
    "OpenModel",
    "PaddedWidth",
    "Progress",
    "RebuildOffer",
    "RebuildOutcome",
    "RebuildProgress",
    "Rebuilder",
    "Remedy",
    "Restore",
    "Runner",
    "Sample",
    "SamplingParams",
    "Save",
    "SaveBlock",
    "StateRange",
    "StepPlan",
    "StepResult",
    "StepRow",
    "StepStatus",
    "Tokenizer",
    "Truncate",
    "Widths",
]


class Widths(NamedTuple):
    """Row counts that a runner pads its steps to, or that fill its tiles, ascending."""

    prefill: tuple[int, ...] = ()
    """Of a step that prefills alone."""
    mixed_decode: tuple[int, ...] = ()
    """Of the decode rows in a step that prefills too."""
    mixed: tuple[int, ...] = ()
    """Of such a step in all."""
    decode: tuple[int, ...] = ()
    """Of a step that only decodes, drafts included."""

    def padded(self, decode: int, prompts: int) -> "PaddedWidth":
        """The width of a step with so many tokens of decode rows and of prompts. Wider than all: as it is."""
        decode = next((width for width in self.mixed_decode if decode <= width), decode)
        total = decode + prompts
        widths = self.mixed if decode else self.prefill
        return PaddedWidth(decode, next((width for width in widths if total <= width), total))


class PaddedWidth(NamedTuple):
    """Rows of a step with prompts, as a runner computes it."""

    decode: int
    """Of them, those for sequences that decode."""
    total: int


_ANY_WIDTH = Widths()


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Static properties of a loaded model that the scheduler relies on."""

    context_tokens: int
    """Longest single sequence."""
    kv_tokens: int
    """Cells of the cache, all slots together."""
    max_slots: int
    max_rows: int
    max_step_tokens: int
    depth: int = 1
    """Steps in flight: 1 or 2."""
    rewind: Literal["any", "last_n", "checkpoint"] = "any"
    """Where a slot may be truncated. `any`: everywhere. `last_n`: to position n while the slot's `earliest <=
    max(0, n - rewind_tokens)` (sliding window). `checkpoint`: nowhere, only whole states can be restored or
    aliased (recurrent and hybrid models): prefix hits at checkpoints only, and drafts where slots beyond
    `max_rows` can hold the states from before them."""
    rewind_tokens: int = 0
    share: bool = True
    """True if one slot's prefix can be aliased by another."""
    block_tokens: int = 0
    """Page size; 0: the cache is not paged."""
    window_tokens: int = 0
    """Keys that a query sees in windowed layers with blocks of their own (a paged cache); 0: there are none."""
    window_blocks: int = 0
    """Number of those blocks; `kv_tokens` counts the others."""
    host_blocks: int = 0
    """Blocks of a paged cache that host memory holds (SaveBlock, LoadBlock); then the runner is a
    HostBlockRunner."""
    host_block_s: float = 0.0
    """Measured time of loading a host block; 0: none worth counting."""
    host_layout: str = ""
    """Names the arrangement of a host block's bytes: KV of another arrangement is never read."""
    bytes_per_token: int = 0
    """KV of one token."""
    state_bytes: int = 0
    """Fixed part of a saved state (recurrent models)."""
    saved_states: int = 0
    """Of a paged cache with `checkpoint`: states that can be saved at once, in the device's memory."""
    state_interval_tokens: int = 0
    """With `checkpoint`: a state is saved after so many tokens of a prompt; 0: only near its end."""
    exports: Literal["", "range", "whole"] = ""
    """What of a slot can be taken out of the process and imported by another one (ExportingRunner): any range
    of its tokens, its whole state, or nothing."""
    draft_model: bool = False
    """True if the runner is a DraftingRunner (drafter.py)."""
    embeddings: bool = False
    all_logprobs: bool = False
    """True if a prompt's position can bring the log probabilities of all tokens."""
    kv_type: str = "f16"
    kv_types: tuple[str, ...] = ("f16",)
    step_target_s: float = 0.25
    """Longest step."""
    seeds_run_alone: bool = False
    """Requests with a seed share no step with others. Neighbors change the bits of their rows, and a step of
    several sequences gains little here."""
    draft_rows: int = 32
    """Sequences that run at once up to which there are drafts. With more, a step's rows fill the machine, and
    looking for drafts would cost more than they save."""
    draft_step_tokens: int = 1 << 30
    """Most tokens of a step with drafts: of wider ones, none comes often enough to be prepared."""
    prepares_steps: bool = False
    """A step's kind is slow until it was prepared; then the runner is a PreparingRunner (prepared_steps.py)."""
    shared_step_target_s: float = 0.0
    """The same where a prefill delays other sequences' next tokens; 0: no other target."""
    widths: Widths = _ANY_WIDTH
    """Empty: a step costs what it computes."""
    limits: tuple[str, ...] = ()
    """What this model cannot do, in sentences for `show` and for cache misses."""


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
    """The model's own defaults, by Sampling field name."""
    layers: int = 0
    pooling: str = ""
    """How token vectors become a text's embedding (`mean`, `cls`, `last`). Then the open model is an
    EmbeddingModel too. Empty: the model writes text."""
    identity: str = ""
    """Identifies the weights for prefix caches and fingerprints (sizes, header digest)."""


class MemoryReport(NamedTuple):
    """Allocated bytes, as the runner knows them; -1: unknown."""

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
    """Bytes of the longest token: a text has at least len(bytes) / longest_piece tokens."""

    @property
    def special_tokens(self) -> Sequence[SpecialToken]:
        """Control and user-defined tokens; computed at the first use."""

    def encode(self, text: str, *, special: bool = False, add_bos: bool = False) -> list[int]:
        """Token ids of a text. Keeps lone surrogates and NUL if the vocabulary can; never raises.

        special: recognise control tokens written in the text.
        """
        ...

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Bytes of one token; control tokens are empty unless `special`. Raises ValueError out of range."""
        ...

    def special(self, name: str) -> int:
        """Id of `fim_pre`, `fim_suf`, `fim_mid`, `fim_pad`, `fim_rep`, `fim_sep`, `eot`, `sep`; -1: none."""
        ...


class Runner(Protocol):
    """Executes the plans of one loaded model.

    `launch` and `collect` are called from one thread, first in first out, at most `capabilities.depth` steps
    ahead. Only `abort` may be called from another thread.
    """

    capabilities: Capabilities

    def launch(self, plan: StepPlan) -> None:
        """Begin a step. Raises DeviceFault, and on a broken invariant; lack of memory is a result."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest launched step. Raises DeviceFault."""
        ...

    def abort(self) -> None:
        """End the running step early; its result has what was computed. Best effort."""
        ...

    def warm_up_next(self) -> bool:
        """Do a small part of the work that makes later steps faster; no step is in flight.

        False: nothing is left to do. Raises DeviceFault.
        """
        ...

    def memory(self) -> MemoryReport: ...

    def close(self) -> None:
        """Release everything. Idempotent."""
        ...


class LoadRequest(NamedTuple):
    """One load: its plan, and what the user asked for."""

    plan: MemoryPlan
    options: LoadOptions
    safe_mode: bool = False
    """Avoid what is known to crash here."""


Progress: TypeAlias = Callable[[int, int], bool]
"""(done_bytes, total_bytes) -> continue? False makes the load raise EngineClosed."""


class OpenModel(Protocol):
    """A model whose header and vocabulary are read, and whose weights are not.

    It tokenizes at once, so that requests can be prepared or refused before the load.
    """

    info: ModelInfo
    tokenizer: Tokenizer

    def plan(self, options: LoadOptions) -> MemoryPlan:
        """Plan a load on this machine now. Raises DoesNotFit with advice."""
        ...

    def load(
        self, request: LoadRequest, progress: Progress, notify: Callable[[str], None]
    ) -> Runner:
        """Read the weights and warm up. Raises ModelInvalid, DoesNotFit, DeviceFault.

        notify: gets sentences for the user.
        """
        ...

    def close(self) -> None: ...


class Embedder(Protocol):
    """A loaded embedding model. Used from one thread, apart from `abort`.

    Only llama.cpp has one so far; it is a Protocol because the core imports no backend.
    """

    context_tokens: int
    """Most tokens of one text."""

    def embed(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """A vector of Euclidean length 1 for each text of 1 to `context_tokens` tokens; of a reranker, one
        score for each pair. Raises EngineClosed after `abort`."""
        ...

    def abort(self) -> None:
        """End `embed` soon. From any thread."""
        ...

    def memory(self) -> MemoryReport: ...

    def close(self) -> None:
        """Release everything. Idempotent."""
        ...


class EmbeddingModel(Protocol):
    """Further methods of an open model whose info has a pooling."""

    def pair_tokens(self, query: str, text: str) -> list[int]:
        """Tokens of a query and a text that a reranker scores for it. From any thread."""
        ...

    def text_tokens(self, text: str) -> list[int]:
        """Tokens of a whole text, with those that begin and end one. From any thread."""
        ...

    def load_embedder(
        self, request: LoadRequest, progress: Progress, notify: Callable[[str], None]
    ) -> Embedder:
        """See OpenModel.load."""
        ...


@dataclass(frozen=True, slots=True)
class Availability:
    """True if a backend can run here."""

    ok: bool
    reason: str
    """A sentence."""
    hint: str = ""
    """What to do about it, in sentences."""
    versions: tuple[tuple[str, str], ...] = ()
    """Library versions that decide the text; they go into fingerprints."""


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
    """A backend's library as it was built."""

    library: str
    """Its file or name."""
    version: str
    features: frozenset[str]
    """Instruction sets or compute capabilities."""
    offload: bool
    """True if it can put layers on a GPU."""
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True)
class Remedy:
    """Something a user can do for a better build."""

    sentence: str
    rebuild: str = ""
    """The kind of build that `Rebuilder.rebuild` makes for it; empty: no build helps."""


@dataclass(frozen=True, slots=True)
class RebuildOffer:
    """A build of the backend's library that would be better for this machine."""

    kind: str
    gain: str
    """What it brings: the end of a sentence that begins with the build."""
    minutes: float
    """Expected time of the build on this machine."""
    missing: str = ""
    """What has to be installed first, as a sentence; empty: nothing."""


class RebuildProgress(NamedTuple):
    """State of a build that runs."""

    step: str
    done: int = 0
    total: int = 0
    """0: the step has no parts to count."""


@dataclass(frozen=True, slots=True)
class RebuildOutcome:
    """End of a rebuild."""

    taken: bool
    """The new library is in use from now on; otherwise everything is as before."""
    sentence: str
    """Why, with the speeds that were measured."""


class Rebuilder(Protocol):
    """Builds a backend's library for this machine, tries it, and takes it if it is right and faster."""

    @property
    def kinds(self) -> Sequence[str]:
        """Builds that can be made, by what they compute on."""
        ...

    def offer(self) -> RebuildOffer | None:
        """The build that would help most; None: the library in use fits. Loads no library."""
        ...

    def minutes(self, kind: str) -> float:
        """Expected time of a build on this machine."""
        ...

    def rebuild(self, kind: str, report: Callable[[RebuildProgress], None]) -> RebuildOutcome:
        """Build, try, and take or leave it. Blocks for minutes; an interrupt leaves everything as it was, and
        no process behind. Raises LocalchatError if it cannot be built, or another rebuild runs; OSError."""
        ...

    def undo(self) -> bool:
        """Take the build in use back; False if there is none. Raises LocalchatError if a rebuild runs,
        OSError."""
        ...


class Backend(Protocol):
    """One way to run models. Found through the entry-point group `localchat.backends`; made without arguments.

    `plan`, `objection` and `expected_rate` take a model whose file is one of `kinds`, known by its header
    alone. Only `open`, `build_info` and `remedies` may load a native library.
    """

    @property
    def name(self) -> str: ...

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Files that it runs. For those of the first kind it is chosen before backends that list it later."""
        ...

    def build_key(self) -> str:
        """Names the native build and this CPU (library file, size, date; CPU model): safe mode is remembered
        by it. Empty where nothing native could crash."""
        ...

    def available(self) -> Availability:
        """True if it can run here. Imports nothing heavy."""
        ...

    def accepts(self, path: Path) -> bool:
        """True if it is for the file or folder at `path`, by its first bytes or name."""
        ...

    def open(self, path: Path, notify: Callable[[str], None]) -> OpenModel:
        """Read header and vocabulary. Raises ModelMissing, ModelInvalid."""
        ...

    def objection(self, model: ModelSummary) -> str:
        """Why this build cannot run a model: the end of a sentence, empty where nothing is against it."""
        ...

    def with_gpus(self, machine: Machine) -> Machine:
        """The machine with the GPUs that this build could use and that `read_machine` cannot see. May take a
        second."""
        ...

    def plan(self, model: ModelSummary, options: LoadOptions, machine: Machine) -> MemoryPlan:
        """Memory of a load on this machine, whether or not it fits. Raises UsageError for options that this
        model cannot have."""
        ...

    def expected_rate(
        self,
        model: ModelSummary,
        plan: MemoryPlan,
        threads: int,
        past: Sequence[PastRun] = (),
    ) -> Estimate | None:
        """Predict the tokens per second of one request with a short context on a quiet machine.

        The estimate is a range. threads: 0 for every physical core. past: runs of other models with as many
        threads and all layers where this plan has them, which correct the estimate. Takes less than a second.
        None if the backend cannot tell."""
        ...

    def build_info(self) -> BuildInfo:
        """The library as it is. Raises LocalchatError, ImportError, OSError."""
        ...

    def remedies(self) -> tuple[Remedy, ...]:
        """Ways to a better build, best first: a rebuild for an unused GPU, ways around a crash."""
        ...

    def rebuilder(self) -> Rebuilder | None:
        """Builds the library for this machine; None: the backend has none that a user could build."""
        ...


class MinimalBackend:
    """A Backend without plans and diagnostics; a subclass adds name, available, accepts and open."""

    kinds: tuple[Kind, ...] = ()

    def build_key(self) -> str:
        return ""

    def objection(self, model: ModelSummary) -> str:
        return ""

    def with_gpus(self, machine: Machine) -> Machine:
        return machine

    def plan(self, model: ModelSummary, options: LoadOptions, machine: Machine) -> MemoryPlan:
        raise LocalchatError("this backend plans a load only once the model is open")

    def expected_rate(
        self,
        model: ModelSummary,
        plan: MemoryPlan,
        threads: int,
        past: Sequence[PastRun] = (),
    ) -> Estimate | None:
        return None

    def build_info(self) -> BuildInfo:
        return BuildInfo("", "", frozenset(), offload=False, devices=())

    def remedies(self) -> tuple[Remedy, ...]:
        return ()

    def rebuilder(self) -> Rebuilder | None:
        return None
