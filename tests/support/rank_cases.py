"""Tiny checkpoints of every family and storage format, to compare several ranks with one."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from localchat.fit.load_options import RoundedType
from tests.support import float_checkpoints, quantizers, tiny_models
from tests.support.fp8_checkpoints import LAYOUTS, save_fp8
from tests.support.quantizers import Way
from tests.support.thread_ranks import on_ranks
from tests.support.tiny_models import KINDS, Tiny, tokens_of

Save = Callable[[Any, Path], None]
_EVEN = {"num_attention_heads": 4, "num_key_value_heads": 2}
_WIDE = {"hidden_size": 256, "intermediate_size": 512}
"""Two groups of a scale or more for each of two ranks."""


@dataclass(frozen=True)
class RankCase:
    """A family with changes, and how its checkpoint is written."""

    kind: str
    changes: dict[str, Any] = field(default_factory=dict)
    save: Save = tiny_models.save
    rounded: RoundedType | None = None
    near: float = 1e-5
    """Relative distance of logits that rounding explains."""


FAMILIES = {kind: RankCase(kind, _EVEN if kind == "glm4-moe-lite" else {}) for kind in KINDS}
"""A case per family that can be divided."""


def _stored(way: Way, *how: Any) -> Save:
    return lambda model, folder: quantizers.save(model, folder, way, *how)


def _fp8(layout: str) -> Save:
    return lambda model, folder: save_fp8(model, folder, layout)


def _floats(layout: str) -> Save:
    return lambda model, folder: float_checkpoints.save_floats(model, folder, layout)


_SAVES: dict[str, Save] = {
    "awq": tiny_models.save_awq,
    "gptq": _stored(Way(symmetric=True)),
    "gptq version 2": _stored(Way(), 2),
    "gptq groups of 32": _stored(Way(size=32), 2),
    "gptq one group": _stored(Way(size=0, symmetric=True)),
    "gptq 8 bits": _stored(Way(symmetric=True, bits=8)),
    "compressed": _stored(Way(symmetric=True), 0),
    "compressed zeros": _stored(Way(), 0),
    "compressed 8 bits": _stored(Way(bits=8), 0),
    "int8": _stored(Way(bits=8, symmetric=True), "int8"),
    "int8 rows": _stored(Way(size=0, bits=8, symmetric=True), "int8"),
    **{f"fp8 {layout}": _fp8(layout) for layout in LAYOUTS},
    **{layout: _floats(layout) for layout in float_checkpoints.CONFIGS},
}
_MIXTURE = {**_WIDE, **_EVEN, "moe_intermediate_size": 256}
FORMATS = {
    **{name: RankCase("llama", _WIDE, save) for name, save in _SAVES.items()},
    "rounded int8": RankCase("llama", _WIDE, rounded="int8"),
    "rounded int4": RankCase("llama", _WIDE, rounded="int4"),
    # Scales of rows are those of the rank's columns.
    "rounded fp8": RankCase("llama", _WIDE, rounded="fp8", near=0.2),
    "mxfp4": RankCase("gpt-oss", {"intermediate_size": 128}, tiny_models.save_mxfp4),
    "experts awq": RankCase("qwen3-moe", _MIXTURE, tiny_models.save_awq),
    "experts gptq": RankCase("qwen3-moe", _MIXTURE, _SAVES["gptq groups of 32"]),
    "experts rounded": RankCase("qwen3-moe", _MIXTURE, rounded="int4"),
    "stacked experts rounded": RankCase("granite-moe", _MIXTURE, rounded="int4"),
    "shared experts": RankCase(
        "qwen2-moe", {**_MIXTURE, "shared_expert_intermediate_size": 512}, tiny_models.save_awq
    ),
    "stored merged": RankCase("phi3", {**_WIDE, **_EVEN}, tiny_models.save_awq),
}
"""A case per storage format."""


def save_case(case: RankCase, folder: Path) -> RoundedType | None:
    """Write a checkpoint, and return what its layers are rounded to."""
    case.save(tiny_models.reference(case.kind, **case.changes), folder)
    return case.rounded


def distances(case: RankCase, folder: Path, ranks: int) -> list[float]:
    """Return the relative distance of each rank's logits from those of one rank."""
    rounded = save_case(case, folder)
    tokens = tokens_of(31, 40)
    whole = Tiny(folder, torch.float32, rounded=rounded).prompt(tokens, 17)

    def part(collective: Any) -> torch.Tensor:
        tiny = Tiny(folder, torch.float32, rounded=rounded, collective=collective)
        return tiny.prompt(tokens, 17)

    return [
        float((found - whole).norm() / whole.norm())
        for found in (each for each in on_ranks(ranks, part))
    ]
