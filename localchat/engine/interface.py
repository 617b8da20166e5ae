"""Engine: the interface that front ends hold. LocalEngine, RemoteEngine, AttachedEngine and
ScriptedEngine have it."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from localchat.engine.events import EngineStats
from localchat.engine.request import GenerateRequest, Messages
from localchat.engine.stream import Stream


class MemoryParts(msgspec.Struct, frozen=True):
    """Memory of a loaded model, in bytes; -1 where it cannot be known."""

    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    overhead_bytes: int


class TokenizerInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Special tokens and chat template of a model."""

    bos_token: str = ""
    """Text of the token that begins a text; empty if the model has none."""
    eos_token: str = ""
    adds_bos: bool = False
    """A plain text begins with the BOS token."""
    chat_template: str = ""


class EngineInfo(msgspec.Struct, frozen=True):
    """The model that is loaded (or about to be), and how. Sizes in bytes and tokens."""

    model: str
    path: str
    backend: str
    architecture: str
    quantization: str
    parameters: int
    context_tokens: int
    context_train: int
    kv_type: str
    gpu_layers: int
    """Of `layers`."""
    layers: int
    threads: int
    file_bytes: int
    predicted_bytes: int
    actual_bytes: int
    loaded: bool
    safe_mode: bool
    why: str
    """One sentence on the choice of backend and placement."""
    fingerprint: str
    notes: tuple[str, ...] = ()
    """Decisions made for the user."""
    limits: tuple[str, ...] = ()
    """What this model cannot do."""
    warning: str = ""
    """What may spoil answers, for instance a missing chat template."""
    predicted: MemoryParts | None = None
    """Parts of `predicted_bytes`; None where they are not known."""
    actual: MemoryParts | None = None
    """Parts of `actual_bytes`; None where they are not known (yet)."""
    free_bytes: int = 0
    """Memory that was free for the model before its load."""
    kv_types: tuple[str, ...] = ()
    """Types in which this model's KV cache can be stored, best first; empty where they are not known."""
    kv_tokens: int = 0
    """Room of the KV cache for all conversations together; 0: unknown."""
    experts_on_cpu: int = 0
    """Layers whose experts are in RAM although the layer is on the GPU."""
    max_rows: int = 0
    """Sequences that are computed at once, at most; 0: unknown."""
    sampling: dict[str, float] = {}
    """Sampling where a request names none; what is off is missing. Empty where it is not known."""
    tokenizer: TokenizerInfo | None = None
    """None where it is not known."""


class Vectors(list[list[float]]):
    """One vector per text."""

    def __init__(self, vectors: Iterable[list[float]], tokens: Sequence[int]) -> None:
        super().__init__(vectors)
        self.tokens = tuple(tokens)
        """Tokens of each text."""


class Engine(Protocol):
    """A model that answers. Every method may raise a LocalchatError.

    All methods are callable from any thread; only `generate`'s stream may be consumed from an event loop.
    """

    def generate(self, request: GenerateRequest) -> Stream:
        """Begin to answer; returns at once. Errors are raised from the stream."""
        ...

    def embed(self, texts: Sequence[str], *, truncate: bool = False) -> Vectors:
        """A vector of length 1 (Euclidean) for each text, pooled as the model's file says.

        truncate: of a longer text, read as much from its beginning as the model reads at once. A remote
        server refuses such a text all the same.

        Raises ContextExceeded for a text that is longer than the model reads at once, UsageError where the
        model gives no embeddings.
        """
        ...

    def rerank(self, query: str, texts: Sequence[str]) -> Vectors:
        """One number for each text, which is higher the better it answers the query.

        Raises ContextExceeded for a pair that is longer than the model reads at once, UsageError where the
        model is no reranker.
        """
        ...

    def prompt_tokens(self, messages: Messages) -> list[int]:
        """Tokens that a request with these messages is answered from.

        They can differ from those of the rendered text: markup in a message stays text.
        """
        ...

    def tokenize(self, text: str, *, special: bool = False) -> list[int]: ...

    def detokenize(self, tokens: Sequence[int]) -> str: ...

    def render(self, messages: Messages) -> str:
        """The prompt text that the chat template makes of these messages."""
        ...

    def info(self) -> EngineInfo: ...

    def stats(self) -> EngineStats:
        """The engine as a whole, all requests together."""
        ...

    def close(self, deadline_s: float = 2.0) -> None:
        """Unload the model; ends its process after the deadline. Idempotent."""
        ...
