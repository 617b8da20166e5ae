"""Steps that make room for a prompt that is longer than the context: nine, in order, each with what it gives.

The sizes are those of the engine that refused the prompt: memory of its cache and weights, and what was free
before its load. In proportion to the loaded cache, which holds for layers without a sliding window.
"""

from typing import Final

from msgspec import structs

from localchat.engine.interface import EngineInfo
from localchat.fit.kv_types import smaller_kv_type
from localchat.fit.steps import MemoryStep, StepName
from localchat.units import size, tokens

_BLOCK_TOKENS: Final = 1024
_BITS: Final = 4.9
"""Of Q4_K_M, the usual quantization to go down to."""


def prompt_steps(
    prompt: int, info: EngineInfo, context: int | None = None
) -> tuple[MemoryStep, ...]:
    """The nine steps for a prompt of so many tokens. `context`: where the engine's `info` does not know it."""
    if context:
        info = structs.replace(info, context_tokens=context)
    return _PromptSteps(prompt, info).all()


class _PromptSteps:
    def __init__(self, prompt: int, info: EngineInfo) -> None:
        self._prompt = prompt
        self._info = info
        self._over = prompt - info.context_tokens + 1
        wanted = -(-(prompt + _BLOCK_TOKENS) // _BLOCK_TOKENS) * _BLOCK_TOKENS
        self._goal = min(wanted, info.context_train) if info.context_train else wanted
        """Context that the prompt and an answer need, as far as the model was trained."""
        parts = info.actual or info.predicted
        kv_bytes = max(parts.kv_bytes, 0) if parts is not None else 0
        self._weights = max(parts.weights_bytes, 0) if parts is not None else info.file_bytes
        room = max(info.kv_tokens, info.context_tokens, 1)
        self._token_bytes = kv_bytes / room
        total = info.actual_bytes or info.predicted_bytes
        self._spare = info.free_bytes - total + kv_bytes if info.free_bytes else None
        """Memory for a KV cache; None: unknown."""

    def all(self) -> tuple[MemoryStep, ...]:
        return (
            MemoryStep(
                "shorter_input",
                f"shorten the input by {tokens(self._over)} or more",
                gained_tokens=self._over,
                suffices=True,
            ),
            MemoryStep(
                "prefix_reuse", "it saves time: tokens of a reused prefix count like the others"
            ),
            MemoryStep("chunked_prefill", "always on: a prompt is read in steps"),
            *self._memory(),
        )

    @property
    def _fixed(self) -> str:
        """Why no memory lets this prompt in; empty: some would."""
        info = self._info
        if info.backend == "remote":
            return "the server decides on its context: start it with a longer one"
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
            MemoryStep("slots", "the cache is shared: one prompt may take all of it already"),
            self._quantization(),
            self._model(""),
        )

    def _longest(self, token_bytes: float, more_bytes: float = 0.0) -> int | None:
        """Longest context in memory, as far as the model was trained; None: unknown."""
        if self._spare is None or token_bytes <= 0:
            return None
        found = int(max(self._spare + more_bytes, 0) / token_bytes)
        return min(found, self._info.context_train or found)

    def _gained(self, longest: int | None) -> int:
        now = self._info.context_tokens
        return max((self._goal if longest is None else longest) - now, 0)

    def _suffices(self, longest: int | None) -> bool:
        return longest is None or longest > self._prompt

    def _target(self, longest: int | None) -> int:
        """Context to ask for: what the prompt needs, as far as it fits."""
        if longest is None:
            return self._goal
        return max(min(self._goal, longest), 0)

    def _kv_type(self) -> MemoryStep:
        info = self._info
        small = smaller_kv_type(info.kv_type, info.kv_types)
        if small is None:
            return MemoryStep("kv_type", f"{info.kv_type} is small already")
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
            return MemoryStep("context", "memory holds no longer one")
        more = max(self._token_bytes * (target - max(info.kv_tokens, info.context_tokens)), 0)
        cost = f", which takes {size(more)} more" if more else ""
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
            return MemoryStep("gpu_layers", "memory is enough for a longer context as it is")
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
            return MemoryStep("quantization", "memory is enough for a longer context as it is")
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
        """Another model: with a longer context, or with more room beside its weights."""
        change = f"another model, because {why}" if why else "another model with a longer context"
        return MemoryStep("model", change, gained_tokens=self._over, flag="-m MODEL")
