"""Engine: the interface of LocalEngine, RemoteEngine, AttachedEngine and the tests' ScriptedEngine."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from localchat.engine.events import EngineStats
from localchat.engine.request import GenerateRequest, Messages
from localchat.engine.stream import Stream
from localchat.fit.load_options import LoraAdapter
from localchat.units import counted, size


class MemoryParts(msgspec.Struct, frozen=True):
    """Memory of a loaded model in bytes, -1 if unknown."""

    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    overhead_bytes: int


class TokenizerInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Special tokens and chat template of a model."""

    bos_token: str = ""
    """Text of the BOS token, empty if the model has none."""
    eos_token: str = ""
    adds_bos: bool = False
    """Whether plain text starts with the BOS token."""
    chat_template: str = ""


class GpuPart(msgspec.Struct, frozen=True):
    """Planned part of a model on one of several GPUs."""

    layers: int
    """The output layer counts as one."""
    size_bytes: int
    total_bytes: int = 0
    """Memory of the whole GPU, 0 if unknown."""

    @property
    def text(self) -> str:
        """Layers and memory: `15 layers, 5.1 GB of 24.0 GB`."""
        memory = size(self.size_bytes)
        if self.total_bytes:
            memory = f"{memory} of {size(self.total_bytes)}"
        return f"{counted(self.layers, 'layer')}, {memory}"


class EngineInfo(msgspec.Struct, frozen=True):
    """The model that is or will be loaded, and its configuration. Sizes are in bytes and tokens.

    What is unknown, as for a remote server, is 0 or empty.

    Size: front ends ask it instead of the engine process, so it has every fact of a load.
    """

    model: str
    path: str
    backend: str
    architecture: str = ""
    quantization: str = ""
    parameters: int = 0
    context_tokens: int = 0
    context_train: int = 0
    kv_type: str = ""
    gpu_layers: int = 0
    """Number of `layers` on the GPU."""
    layers: int = 0
    threads: int = 0
    file_bytes: int = 0
    predicted_bytes: int = 0
    actual_bytes: int = 0
    loaded: bool = False
    safe_mode: bool = False
    why: str = ""
    """Reason for the choice of backend and placement, as a sentence."""
    fingerprint: str = ""
    notes: tuple[str, ...] = ()
    """Decisions made for the user."""
    limits: tuple[str, ...] = ()
    """Limitations of this model."""
    warning: str = ""
    """Problem that affects all answers, such as a missing chat template."""
    loss: str = ""
    """Quality that a chosen option costs, with a figure. Shown even in a pipe."""
    predicted: MemoryParts | None = None
    """Parts of `predicted_bytes`, None if unknown."""
    actual: MemoryParts | None = None
    """Parts of `actual_bytes`, None if unknown."""
    free_bytes: int = 0
    """Free memory before the load."""
    kv_types: tuple[str, ...] = ()
    """Supported types of the model's KV cache, best first. Empty if unknown."""
    kv_tokens: int = 0
    """Capacity of the KV cache in tokens, 0 if unknown."""
    experts_on_cpu: int = 0
    """GPU layers whose experts are in RAM."""
    gpus: int = 1
    """GPUs that compute every layer together."""
    gpu_parts: tuple[GpuPart, ...] = ()
    """Part of each GPU, in order. Empty with fewer than two GPUs."""
    max_rows: int = 0
    """Maximum number of sequences in a step, 0 if unknown."""
    sampling: dict[str, float] = {}
    """Default sampling without the fields that are off. Empty if unknown."""
    media: tuple[str, ...] = ()
    """Kinds of attachments that the model reads: `image`, `audio`."""
    lora: tuple[LoraAdapter, ...] = ()
    """LoRA adapters with their default scales. Requests name them by their index."""
    only_embeds: bool = False
    """True for an embedding model, which cannot generate text."""
    tokenizer: TokenizerInfo | None = None
    """Tokenizer data, None if unknown."""

    @property
    def adapters(self) -> tuple[str, ...]:
        """Labels of the LoRA adapters, for lists and records."""
        return tuple(adapter.label for adapter in self.lora)


class Vectors(list[list[float]]):
    """A vector for each text."""

    def __init__(self, vectors: Iterable[list[float]], tokens: Sequence[int]) -> None:
        super().__init__(vectors)
        self.tokens = tuple(tokens)
        """Number of tokens of each text."""


class Engine(Protocol):
    """A model that answers requests. Every method may raise a LocalchatError.

    All methods are thread-safe. Only the stream of `generate` may be consumed from an event loop.
    """

    def generate(self, request: GenerateRequest) -> Stream:
        """Start an answer and return immediately. Errors are raised from the stream."""
        ...

    def embed(self, texts: Sequence[str], *, truncate: bool = False) -> Vectors:
        """Return a unit vector for each text, pooled as the model's file specifies.

        truncate: use the start of a text that is too long. Remote servers reject such a text anyway. Raises
        ContextExceeded for a text that is too long for one pass, UsageError if the model cannot compute
        embeddings.
        """
        ...

    def prompt_tokens(self, messages: Messages) -> list[int]:
        """Return the prompt tokens of a request with these messages.

        They can differ from the tokens of the rendered text, because markup in a message stays text.
        """
        ...

    def tokenize(self, text: str, *, special: bool = False) -> list[int]: ...

    def detokenize(self, tokens: Sequence[int]) -> str: ...

    def render(self, messages: Messages) -> str:
        """Return the prompt that the chat template renders."""
        ...

    def info(self) -> EngineInfo: ...

    def stats(self) -> EngineStats:
        """Return the metrics of the engine for all requests together."""
        ...

    def close(self, deadline_s: float = 2.0) -> None:
        """Unload the model, and kill its process after the deadline. Idempotent."""
        ...
