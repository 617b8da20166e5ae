"""Nine steps that make room for a prompt longer than the context, with their gains.

Sizes come from the engine that refused the prompt: its KV cache, its weights, and the free memory before its
load. They scale with the loaded cache, which is right for layers without a sliding window.
"""

from typing import Final

from msgspec import structs

from localchat.engine.interface import EngineInfo
from localchat.fit.kv_types import smaller_kv_type
from localchat.fit.steps import MemoryStep, StepName
from localchat.units import size, tokens

_BLOCK_TOKENS: Final = 1024
_BITS: Final = 4.9
"""Bits per weight of Q4_K_M, the usual smaller quantization."""


def prompt_steps(
    prompt: int, info: EngineInfo, context: int | None = None
) -> tuple[MemoryStep, ...]:
    """Return the nine steps for a prompt length. `context` overrides that of `info`."""
    if context:
        info = structs.replace(info, context_tokens=context)
    return _PromptSteps(prompt, info).all()


class _PromptSteps:
    def __init__(self, prompt: int, info: EngineInfo) -> None:
        self._prompt = prompt
        self._info = info
        self._over = prompt - info.context_tokens + 1
        goal = -(-(prompt + _BLOCK_TOKENS) // _BLOCK_TOKENS) * _BLOCK_TOKENS
        if info.context_train:
            goal = min(goal, info.context_train)
        self._goal = goal
        """Context that the prompt and an answer need, up to the trained context."""
        parts = info.actual or info.predicted
        kv_bytes = 0
        self._weights = info.file_bytes
        if parts is not None:
            kv_bytes = max(parts.kv_bytes, 0)
            self._weights = max(parts.weights_bytes, 0)
        room = max(info.kv_tokens, info.context_tokens, 1)
        self._token_bytes = kv_bytes / room
        total = info.actual_bytes or info.predicted_bytes
        self._spare: int | None = None
        """Memory for a KV cache in bytes. None if unknown."""
        if info.free_bytes:
            self._spare = info.free_bytes - total + kv_bytes

    def all(self) -> tuple[MemoryStep, ...]:
        return (
            MemoryStep(
                "shorter_input",
                f"shorten the input by {tokens(self._over)} or more",
                gained_tokens=self._over,
                suffices=True,
            ),
            MemoryStep(
                "prefix_reuse", "saves time only: tokens of a reused prefix need the same room"
            ),
            MemoryStep("chunked_prefill", "always on: a prompt is computed in chunks"),
            *self._memory(),
        )

    @property
    def _fixed(self) -> str:
        """Reason why no amount of memory makes room. Empty if memory can."""
        info = self._info
        if info.backend == "remote":
            return "the server sets its context: start it with a longer one"
        if info.context_train and self._prompt >= info.context_train:
            return f"this model was trained for {tokens(info.context_train)}"
        return ""

    def _memory(self) -> tuple[MemoryStep, ...]:
        names: tuple[StepName, ...]
        names = ("kv_type", "context", "gpu_layers", "slots", "quantization")
        if why := self._fixed:
            return (*(MemoryStep(name, why) for name in names), self._model(why))
        return (
            self._kv_type(),
            self._context(),
            self._gpu_layers(),
            MemoryStep("slots", "the cache is shared: one prompt can already use all of it"),
            self._quantization(),
            self._model(""),
        )

    def _longest(self, token_bytes: float, more_bytes: float = 0.0) -> int | None:
        """Return the longest context in memory, up to the trained one. None if unknown."""
        if self._spare is None or token_bytes <= 0:
            return None
        longest = int(max(self._spare + more_bytes, 0) / token_bytes)
        return min(longest, self._info.context_train or longest)

    def _gained(self, longest: int | None) -> int:
        if longest is None:
            longest = self._goal
        return max(longest - self._info.context_tokens, 0)

    def _suffices(self, longest: int | None) -> bool:
        return longest is None or longest > self._prompt

    def _target(self, longest: int | None) -> int:
        """Return the context to request. It covers the prompt as far as memory allows."""
        if longest is None:
            return self._goal
        return max(min(self._goal, longest), 0)

    def _kv_type(self) -> MemoryStep:
        info = self._info
        small = smaller_kv_type(info.kv_type, info.kv_types)
        if small is None:
            return MemoryStep("kv_type", f"{info.kv_type} is already small")
        longest = self._longest(self._token_bytes * small.share)
        target = self._target(longest)
        if target <= info.context_tokens:
            return MemoryStep("kv_type", f"{small.kv_type} leaves no room for a longer context")
        saved = self._token_bytes * (1 - small.share) * info.context_tokens
        return MemoryStep(
            "kv_type",
            f"KV cache in {small.kv_type} rather than {info.kv_type}, and {tokens(target)} of context",
            round(saved),
            self._gained(longest),
            self._suffices(longest),
            f"--kv-type {small.kv_type} --ctx {target}",
            (("kv_cache_type", small.kv_type), ("context_length", str(target))),
        )

    def _context(self) -> MemoryStep:
        info = self._info
        longest = self._longest(self._token_bytes)
        target = self._target(longest)
        if target <= info.context_tokens:
            return MemoryStep("context", "memory has no room for a longer one")
        more = max(self._token_bytes * (target - max(info.kv_tokens, info.context_tokens)), 0)
        cost = ""
        if more:
            cost = f", which takes {size(more)} more"
        return MemoryStep(
            "context",
            f"{tokens(target)} rather than {info.context_tokens:,}{cost}",
            0,
            self._gained(longest),
            self._suffices(longest),
            f"--ctx {target}",
            (("context_length", str(target)),),
        )

    def _gpu_layers(self) -> MemoryStep:
        info = self._info
        if not info.gpu_layers:
            return MemoryStep("gpu_layers", "no layer is on a GPU")
        if info.backend == "cuda":
            return MemoryStep("gpu_layers", "this backend keeps all layers on the GPU")
        if self._suffices(self._longest(self._token_bytes)):
            return MemoryStep("gpu_layers", "memory is already enough for a longer context")
        layer = (self._weights + self._token_bytes * self._goal) / max(info.layers, 1)
        short = self._token_bytes * self._goal - (self._spare or 0)
        moved = min(max(-(-round(short) // max(round(layer), 1)), 1), info.gpu_layers)
        left = info.gpu_layers - moved
        freed = moved * layer
        longest = self._longest(self._token_bytes, freed)
        return MemoryStep(
            "gpu_layers",
            f"{left} of {info.layers} rather than {info.gpu_layers}: the rest goes to RAM, slower",
            round(freed),
            self._gained(longest),
            self._suffices(longest),
            f"--gpu-layers {left} --ctx {self._target(longest)}",
            (("gpu_layers", str(left)), ("context_length", str(self._target(longest)))),
        )

    def _quantization(self) -> MemoryStep:
        from localchat.fit.memory_plan import usual_bits  # and with it the probe of the hardware

        bits = usual_bits(self._info.quantization)
        if self._suffices(self._longest(self._token_bytes)):
            return MemoryStep("quantization", "memory is already enough for a longer context")
        if bits is None or bits <= _BITS:
            return MemoryStep("quantization", f"{self._info.quantization or 'this one'} is small")
        freed = self._weights * (1 - _BITS / bits)
        longest = self._longest(self._token_bytes, freed)
        return MemoryStep(
            "quantization",
            f"Q4_K_M of this model rather than {self._info.quantization}",
            round(freed),
            self._gained(longest),
            self._suffices(longest),
        )

    def _model(self, why: str) -> MemoryStep:
        """Return the step to another model, with a longer context or smaller weights."""
        change = "another model with a longer context"
        if why:
            change = f"another model, because {why}"
        return MemoryStep("model", change, gained_tokens=self._over, flag="-m MODEL")
