"""Waist 1: what a door holds. LocalEngine, RemoteEngine and ScriptedEngine implement it."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from localchat.engine.events import EngineStats
from localchat.engine.request import GenerateRequest, Messages
from localchat.engine.stream import Stream


class MemoryParts(msgspec.Struct, frozen=True):
    """What a loaded model takes, in bytes; -1 where it cannot be known."""

    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    overhead_bytes: int


class EngineInfo(msgspec.Struct, frozen=True):
    """What is loaded (or about to be) and how. `why`: one sentence on the choice of backend and placement;
    `notes`: what was decided for the user; `limits`: what this model cannot do; `warning`: what may spoil
    answers (for instance a missing chat template); `predicted` and `actual`: the parts of
    `predicted_bytes` and `actual_bytes`, None where they are not known (yet). Sizes in bytes and
    tokens; gpu_layers of layers."""

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
    layers: int
    threads: int
    file_bytes: int
    predicted_bytes: int
    actual_bytes: int
    loaded: bool
    safe_mode: bool
    why: str
    fingerprint: str
    notes: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    warning: str = ""
    predicted: MemoryParts | None = None
    actual: MemoryParts | None = None
    free_bytes: int = 0
    """Memory that was free for the model before its load."""
    kv_types: tuple[str, ...] = ()
    """How this model's KV cache can be kept, best first; empty where nobody knows."""


class Vectors(list[list[float]]):
    """One vector per text; `tokens`: how many tokens each text took."""

    def __init__(self, vectors: Iterable[list[float]], tokens: Sequence[int]) -> None:
        super().__init__(vectors)
        self.tokens = tuple(tokens)


class Engine(Protocol):
    """A model that answers. All methods are callable from any thread; only `generate`'s stream may be
    consumed from an event loop. Every method may raise a LocalchatError."""

    def generate(self, request: GenerateRequest) -> Stream:
        """Begin to answer; returns at once. Refusals come out of the stream."""
        ...

    def embed(self, texts: Sequence[str]) -> Vectors:
        """A vector of length 1 (Euclidean) for each text, as the model's file says they are pooled. Raises
        ContextExceeded for a text that is longer than the model reads at once, UsageError where the model
        gives no embeddings."""
        ...

    def tokenize(self, text: str, *, special: bool = False) -> list[int]: ...

    def detokenize(self, tokens: Sequence[int]) -> str: ...

    def render(self, messages: Messages) -> str:
        """The prompt text that these messages become."""
        ...

    def info(self) -> EngineInfo: ...

    def stats(self) -> EngineStats:
        """The engine as a whole, all requests together."""
        ...

    def close(self, deadline_s: float = 2.0) -> None:
        """Unload: asks nicely, and after the deadline ends the process. Idempotent."""
        ...
