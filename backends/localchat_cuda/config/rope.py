"""Rotary position embeddings: bases, scalings to longer contexts, and their fields in config.json.

Imports no torch.

Letters: D columns of a head, R of them rotary (R = D without a `partial_rotary_factor`), pair i of R/2:
columns i and i + R/2. Pair i rotates by theta^(-2i/R) radians a position, changed by a scaling. RoFormer
(Su et al., 2021); linear scaling: Chen et al., 2023; YaRN, and the growing base that it calls dynamic NTK:
Peng et al., 2023; long factors: LongRoPE (Ding et al., 2024); llama3: Llama Team, 2024.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from localchat_cuda.config.fields import ConfigFields


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Stretches wavelengths beyond the original context by `factor`, keeps short ones, and blends between."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int

    def scaled(self, plain: list[float], context: int) -> list[float]:
        """Radians a position of each pair, `plain` being the unscaled ones."""
        low = self.low_frequency_factor
        high = self.high_frequency_factor
        found = []
        for radians in plain:
            turns = self.original_context * radians / (2 * math.pi)
            kept = min(max((turns - low) / (high - low), 0.0), 1.0)
            found.append(radians * (kept + (1.0 - kept) / self.factor))
        return found


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Divides positions by `factor`."""

    factor: float

    def scaled(self, plain: list[float], context: int) -> list[float]:
        """See Llama3Scaling."""
        return [radians / self.factor for radians in plain]


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: stretches slow pairs by `factor`, keeps fast ones, with a ramp over the pairs between them."""

    factor: float
    original_context: int
    fast: float
    """Pairs with more turns than this in the original context are kept."""
    slow: float
    """Pairs with fewer turns are stretched."""
    truncate: bool
    """The ends of the ramp are rounded to whole pairs."""
    theta: float

    def scaled(self, plain: list[float], context: int) -> list[float]:
        """See Llama3Scaling."""
        pairs = len(plain)
        low, high = (self._pair(turns, pairs) for turns in (self.fast, self.slow))
        if self.truncate:
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, 2 * pairs - 1)
        width = (high - low) or 0.001
        found = []
        for i, radians in enumerate(plain):
            stretched = min(max((i - low) / width, 0.0), 1.0)
            found.append(radians * (1.0 - stretched + stretched / self.factor))
        return found

    def _pair(self, turns: float, pairs: int) -> float:
        """The pair (a fraction) with so many turns in the original context."""
        span = math.log(self.original_context / (turns * 2 * math.pi))
        return pairs * span / math.log(self.theta)


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE: slows each pair by its own factor.

    `long` if the loaded context is longer than the original one, else `short`: one list for all positions, so
    that the cache stays valid."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int

    def scaled(self, plain: list[float], context: int) -> list[float]:
        """See Llama3Scaling. `context`: tokens that are loaded."""
        factors = self.long if context > self.original_context else self.short
        return [radians / factor for radians, factor in zip(plain, factors, strict=True)]


@dataclass(frozen=True, slots=True)
class DynamicNtkScaling:
    """Dynamic NTK: raises the base if the loaded context is longer than the original one.

    The slowest pair is stretched by about as much as the context is, times `factor`. One base serves all
    positions, so that the cache stays valid."""

    factor: float
    original_context: int
    theta: float

    def scaled(self, plain: list[float], context: int) -> list[float]:
        """See LongRopeScaling."""
        pairs = len(plain)
        if context <= self.original_context or pairs < 2:
            return plain
        grown = self.factor * (context / self.original_context - 1.0) + 1.0
        theta = self.theta * grown ** (pairs / (pairs - 1))
        return [theta ** (-i / pairs) for i in range(pairs)]


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Turns the first `share` of the pairs, as far as if all turned, and leaves the others as they are."""

    share: float
    factor: float

    def scaled(self, plain: list[float], context: int) -> list[float]:
        """See Llama3Scaling."""
        turning = int(self.share * len(plain))
        return [radians / self.factor for radians in plain[:turning]] + [0.0] * (
            len(plain) - turning
        )


Scaling: TypeAlias = (
    Llama3Scaling
    | LinearScaling
    | YarnScaling
    | LongRopeScaling
    | DynamicNtkScaling
    | ProportionalScaling
)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary embedding of a layer."""

    theta: float
    scaling: Scaling | None = None
    columns: int = 0
    """R; 0: all of a head."""
    magnitude: float = 1.0
    """Factor of cosines and sines."""

    def radians(self, d: int, context: int) -> tuple[float, ...]:
        """Radians a position of each of the R/2 pairs, if `context` tokens are loaded."""
        turning = self.columns or d
        plain = [self.theta ** (-2 * i / turning) for i in range(turning // 2)]
        return tuple(plain if self.scaling is None else self.scaling.scaled(plain, context))


class Rotations(NamedTuple):
    """Rotations of a model's layers."""

    all: Rotation
    windowed: Rotation | None
    """Of layers with a window, if theirs differs."""
    context: int
    """Tokens that the scaling reaches; 0: not stated."""
    bound: int
    """Beyond so many tokens queries are scaled by their position, which no kernel here does; 0: never."""


def read_rotations(fields: ConfigFields, head_dim: int, context: int) -> Rotations:
    """Read the rotations of a config. `context`: max_position_embeddings. Raises ModelInvalid.

    transformers 5 writes all into rope_parameters, by kind of layer if they differ; 4 into several fields."""
    held = fields.section("rope_parameters")
    stated = held or fields.section("rope_scaling")
    own = {**stated}
    windowed: Mapping[str, Any] = {}
    if isinstance(held.get("full_attention"), dict):
        own = {**fields.section("full_attention", held)}
        windowed = fields.section("sliding_attention", held)
    elif fields.raw.get("rope_local_base_freq") is not None:
        windowed = {"rope_theta": fields.number("rope_local_base_freq", 10000.0)}
    found = _read(fields, own, head_dim, context)
    reached = 0
    if isinstance(found.scaling, YarnScaling):
        reached = round(found.scaling.factor * found.scaling.original_context)
    bound = _original(fields, own, context) if own.get("llama_4_scaling_beta") else 0
    other = _read(fields, windowed, head_dim, context) if windowed else None
    return Rotations(found, other if other != found else None, reached, bound)


def _read(fields: ConfigFields, held: Mapping[str, Any], head_dim: int, context: int) -> Rotation:
    theta = fields.number("rope_theta", fields.number("rope_theta", 10000.0), held, above=1.0)
    share = fields.number(
        "partial_rotary_factor", fields.number("partial_rotary_factor", 1.0), held
    )
    if held.get("rope_type") == "proportional":
        return Rotation(
            theta, ProportionalScaling(min(share, 1.0), fields.number("factor", 1.0, held))
        )
    columns = int(head_dim * share)
    if columns > head_dim or columns < 2 or columns % 2:
        raise fields.unsupported(f"{columns} of {head_dim} columns of a head turned by positions")
    rotary_columns = 0 if columns == head_dim else columns
    kind = held.get("rope_type") or held.get("type") or "default"
    if "short_factor" in held:
        kind = "longrope"
    if kind in ("default", "mrope"):  # of text alone, all parts of a position are equal
        return Rotation(theta, None, rotary_columns)
    if kind == "linear":
        return Rotation(theta, LinearScaling(fields.number("factor", 1.0, held)), rotary_columns)
    if kind == "dynamic":
        return Rotation(
            theta,
            DynamicNtkScaling(fields.number("factor", 1.0, held), context, theta),
            rotary_columns,
        )
    if kind == "llama3":
        return Rotation(theta, _llama3(fields, held), rotary_columns)
    if kind == "yarn":
        return _yarn(fields, held, theta, rotary_columns, context)
    if kind in ("longrope", "su"):
        return _long(fields, held, theta, columns, head_dim, context)
    raise fields.unsupported(f"rotary positions of type {kind}")


def _original(fields: ConfigFields, held: Mapping[str, Any], default: float) -> int:
    """Tokens of the context before it was stretched; above 1, since its logarithm is a divisor."""
    return math.ceil(fields.number("original_max_position_embeddings", default, held, above=1.0))


def _llama3(fields: ConfigFields, held: Mapping[str, Any]) -> Llama3Scaling:
    low = fields.number("low_freq_factor", 1.0, held)
    return Llama3Scaling(
        fields.number("factor", 8.0, held),
        low,
        fields.number("high_freq_factor", 4.0, held, above=low),
        _original(fields, held, 8192),
    )


def _yarn(
    fields: ConfigFields, held: Mapping[str, Any], theta: float, rotary_columns: int, context: int
) -> Rotation:
    original = _original(fields, held, context)
    factor = fields.number("factor", max(context / original, 1.0), held)
    scaling = YarnScaling(
        factor,
        original,
        fields.number("beta_fast", 32.0, held),
        fields.number("beta_slow", 1.0, held),
        bool(held.get("truncate", True)),
        theta,
    )

    default = sharpened(factor, 1.0)
    if held.get("mscale") and held.get("mscale_all_dim"):
        own, every = (fields.number(name, 1.0, held) for name in ("mscale", "mscale_all_dim"))
        default = sharpened(factor, own) / sharpened(factor, every)
    return Rotation(
        theta, scaling, rotary_columns, fields.number("attention_factor", default, held)
    )


def sharpened(factor: float, weight: float) -> float:
    """YaRN's factor of queries and keys where a context is stretched by `factor`."""
    if factor > 1.0:
        return 1.0 + 0.1 * weight * math.log(factor)
    return 1.0


def _long(
    fields: ConfigFields,
    held: Mapping[str, Any],
    theta: float,
    columns: int,
    head_dim: int,
    context: int,
) -> Rotation:
    stated = fields.number("original_max_position_embeddings", context)
    original = _original(fields, held, stated)
    factor = fields.number("factor", context / original, held)
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    scaling = LongRopeScaling(
        fields.numbers("short_factor", columns // 2, held),
        fields.numbers("long_factor", columns // 2, held),
        original,
    )
    magnitude = fields.number("attention_factor", default, held)
    return Rotation(theta, scaling, 0 if columns == head_dim else columns, magnitude)
