"""Steps that make room for a prompt longer than the context, with their gains.

Sizes come from the engine that refused the prompt: its KV cache, and the free memory before its load. They
scale with the loaded cache, which is right for layers without a sliding window.
"""

from collections.abc import Iterator
from typing import Final

from msgspec import structs

from localchat.engine.interface import EngineInfo
from localchat.fit.kv_types import smaller_kv_type
from localchat.fit.steps import MemoryStep
from localchat.units import size, tokens

_BLOCK_TOKENS: Final = 1024
_MIN_CACHE_TOKENS: Final = 256
"""Tokens for which llama.cpp allocates memory at least."""


def prompt_steps(
    prompt: int, info: EngineInfo, context: int | None = None, *, growth: int = _BLOCK_TOKENS
) -> tuple[MemoryStep, ...]:
    """Return the steps that help with a prompt of this length, in order.

    `context` overrides that of `info`. `growth`: tokens that a longer context adds to the prompt, if they fit.
    """
    if context:
        info = structs.replace(info, context_tokens=context)
    return tuple(_PromptSteps(prompt, info, growth).steps())


class _PromptSteps:
    def __init__(self, prompt: int, info: EngineInfo, growth: int) -> None:
        self._prompt = prompt
        self._info = info
        self._over = prompt - info.context_tokens + 1
        goal = -(-(prompt + growth) // _BLOCK_TOKENS) * _BLOCK_TOKENS
        if info.context_train:
            goal = min(goal, info.context_train)
        self._goal = goal
        """Context that the prompt and its growth need, up to the trained context."""
        parts = info.actual or info.predicted
        kv_bytes = max(parts.kv_bytes, 0) if parts is not None else 0
        room = max(info.kv_tokens, info.context_tokens, _MIN_CACHE_TOKENS)
        self._token_bytes = kv_bytes / room
        total = info.actual_bytes or info.predicted_bytes
        self._spare: int | None = None
        """Memory for a KV cache in bytes. None if unknown."""
        if info.free_bytes:
            self._spare = info.free_bytes - total + kv_bytes

    def steps(self) -> Iterator[MemoryStep]:
        yield MemoryStep(
            "shorter_input",
            f"shorten the input by {tokens(self._over)} or more",
            gained_tokens=self._over,
            suffices=True,
        )
        change = "one with a longer context"
        if why := self._fixed:
            change = f"{change}, because {why}"
        else:
            yield from self._longer_context()
        yield MemoryStep("model", change, suffices=True, flag="-m MODEL")

    @property
    def _fixed(self) -> str:
        """Reason why no amount of memory makes room. Empty if memory can."""
        info = self._info
        if info.backend == "remote":
            return "the server sets the context; or start the server with a longer one"
        if info.context_train and self._prompt >= info.context_train:
            return f"this model was trained for {tokens(info.context_train)}"
        return ""

    def _longest(self, token_bytes: float) -> int | None:
        """Return the longest context in memory, up to the trained one. None if unknown."""
        if self._spare is None or token_bytes <= 0:
            return None
        longest = int(max(self._spare, 0) / token_bytes)
        return min(longest, self._info.context_train or longest)

    def _suffices(self, longest: int | None) -> bool:
        return longest is None or longest > self._prompt

    def _target(self, longest: int | None) -> int:
        """Return the context to request. It covers the prompt as far as memory allows."""
        if longest is None:
            return self._goal
        return max(min(self._goal, longest), 0)

    def _longer_context(self) -> Iterator[MemoryStep]:
        """Yield a smaller KV type, if needed, and a longer context, if they make room."""
        info = self._info
        small = smaller_kv_type(info.kv_type, info.kv_types)
        if small is not None and not self._suffices(self._longest(self._token_bytes)):
            longest = self._longest(self._token_bytes * small.share)
            target = self._target(longest)
            if target > info.context_tokens:
                saved = self._token_bytes * (1 - small.share) * info.context_tokens
                yield MemoryStep(
                    "kv_type",
                    f"KV cache in {small.kv_type} rather than {info.kv_type}, and {tokens(target)} of "
                    "context",
                    round(saved),
                    target - info.context_tokens,
                    self._suffices(longest),
                    f"--kv-type {small.kv_type} --ctx {target}",
                    (("kv_cache_type", small.kv_type), ("context_length", str(target))),
                )
        longest = self._longest(self._token_bytes)
        target = self._target(longest)
        if target > info.context_tokens:
            more = max(self._token_bytes * (target - max(info.kv_tokens, info.context_tokens)), 0)
            cost = ""
            if more:
                cost = f", which takes {size(more)} more"
            yield MemoryStep(
                "context",
                f"{tokens(target)} rather than {info.context_tokens:,}{cost}",
                0,
                target - info.context_tokens,
                self._suffices(longest),
                f"--ctx {target}",
                (("context_length", str(target)),),
            )
