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
    """Stretch long wavelengths by `factor`, keep short ones, and blend those between."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int

    def scaled(self, plain: list[float], context: int) -> list[float]:
        """Return the radians per position of each pair. `plain`: the unscaled radians."""
        low = self.low_frequency_factor
        high = self.high_frequency_factor
        scaled = []
        for radians in plain:
            turns = self.original_context * radians / (2 * math.pi)
            unscaled_share = min(max((turns - low) / (high - low), 0.0), 1.0)
            scaled.append(radians * (unscaled_share + (1.0 - unscaled_share) / self.factor))
        return scaled


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Stretch slow pairs by `factor` and keep fast ones, with a ramp between them (YaRN)."""

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
        scaled = []
        for pair, radians in enumerate(plain):
            stretched_share = min(max((pair - low) / width, 0.0), 1.0)
            scaled.append(radians * (1.0 - stretched_share + stretched_share / self.factor))
        return scaled

    def _pair(self, turns: float, pairs: int) -> float:
        """Return the fractional pair that makes `turns` turns in the original context."""
        span = math.log(self.original_context / (turns * 2 * math.pi))
        return pairs * span / math.log(self.theta)


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Slow each pair by a factor of its own (LongRoPE).

    A context longer than the original one uses `long`, and others `short`. One list serves all positions, so
    that the KV cache stays valid."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int

    def scaled(self, plain: list[float], context: int) -> list[float]:
        """See Llama3Scaling. `context`: tokens of the loaded context."""
        factors = self.long if context > self.original_context else self.short
        return [radians / factor for radians, factor in zip(plain, factors, strict=True)]


@dataclass(frozen=True, slots=True)
class DynamicNtkScaling:
    """Raise the base if the loaded context is longer than the original one (dynamic NTK).

    The slowest pair is stretched about as much as the context, times `factor`. One base serves all positions,
    so that the KV cache stays valid."""

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
        return [theta ** (-pair / pairs) for pair in range(pairs)]


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Divide positions by `factor`, and rotate only the first `share` of the pairs.

    Their speed is the one that they have if all rotate."""

    share: float
    factor: float

    def scaled(self, plain: list[float], context: int) -> list[float]:
        """See Llama3Scaling."""
        rotating = int(self.share * len(plain))
        fixed = [0.0] * (len(plain) - rotating)
        return [radians / self.factor for radians in plain[:rotating]] + fixed


Scaling: TypeAlias = (
    Llama3Scaling | YarnScaling | LongRopeScaling | DynamicNtkScaling | ProportionalScaling
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
        """Return the radians per position of each of the R/2 pairs. `context`: tokens of the loaded context."""
        columns = self.columns or d
        plain = [self.theta ** (-2 * pair / columns) for pair in range(columns // 2)]
        if self.scaling is None:
            return tuple(plain)
        return tuple(self.scaling.scaled(plain, context))


class Rotations(NamedTuple):
    """Rotations of a model's layers."""

    all: Rotation
    windowed: Rotation | None
    """Rotation of layers with a window, if it differs."""
    context: int
    """Tokens of the longest context that the scaling supports; 0: not stated."""
    bound: int
    """Tokens beyond which queries need a scale by position, which no kernel here has; 0: never."""


def read_rotations(fields: ConfigFields, head_dim: int, context: int) -> Rotations:
    """Read the rotations of a config. `context`: max_position_embeddings. Raises ModelInvalid.

    transformers 5 writes them to rope_parameters, by kind of layer if they differ; version 4 to several
    fields."""
    parameters = fields.section("rope_parameters")
    section = parameters or fields.section("rope_scaling")
    windowed: Mapping[str, Any] = {}
    if isinstance(parameters.get("full_attention"), dict):
        section = fields.section("full_attention", parameters)
        windowed = fields.section("sliding_attention", parameters)
    elif fields.raw.get("rope_local_base_freq") is not None:
        windowed = {"rope_theta": fields.number("rope_local_base_freq", 10000.0)}
    rotation = _read(fields, section, head_dim, context)
    windowed_rotation: Rotation | None = None
    if windowed:
        windowed_rotation = _read(fields, windowed, head_dim, context)
    if windowed_rotation == rotation:
        windowed_rotation = None
    scaled_context = 0
    if isinstance(rotation.scaling, YarnScaling):
        scaled_context = round(rotation.scaling.factor * rotation.scaling.original_context)
    bound = 0
    if section.get("llama_4_scaling_beta"):
        bound = _original(fields, section, context)
    return Rotations(rotation, windowed_rotation, scaled_context, bound)


def _read(
    fields: ConfigFields, section: Mapping[str, Any], head_dim: int, context: int
) -> Rotation:
    """Read a rotation from a section of the config, whose own fields are the defaults. Raises ModelInvalid."""
    theta = fields.number("rope_theta", fields.number("rope_theta", 10000.0), section, above=1.0)
    share = fields.number(
        "partial_rotary_factor", fields.number("partial_rotary_factor", 1.0), section
    )
    if section.get("rope_type") == "proportional":
        return Rotation(
            theta, ProportionalScaling(min(share, 1.0), fields.number("factor", 1.0, section))
        )
    columns = int(head_dim * share)
    if columns > head_dim or columns < 2 or columns % 2:
        raise fields.unsupported(f"rotations of {columns} of {head_dim} columns of a head")
    rotary_columns = 0 if columns == head_dim else columns
    kind = section.get("rope_type") or section.get("type") or "default"
    if "short_factor" in section:
        kind = "longrope"
    scaling: Scaling | None = None
    match kind:
        case "default" | "mrope":
            pass  # mrope has three positions per token, which are equal in text without images
        case "linear":
            scaling = ProportionalScaling(1.0, fields.number("factor", 1.0, section))
        case "dynamic":
            factor = fields.number("factor", 1.0, section)
            scaling = DynamicNtkScaling(factor, context, theta)
        case "llama3":
            scaling = _llama3(fields, section)
        case "yarn":
            return _yarn(fields, section, theta, rotary_columns, context)
        case "longrope" | "su":
            return _long(fields, section, theta, columns, head_dim, context)
        case _:
            raise fields.unsupported(f"rotary positions of type {kind}")
    return Rotation(theta, scaling, rotary_columns)


def _original(fields: ConfigFields, section: Mapping[str, Any], default: float) -> int:
    """Return the tokens of the context before it was stretched, above 1: its logarithm is a divisor."""
    return math.ceil(fields.number("original_max_position_embeddings", default, section, above=1.0))


def _llama3(fields: ConfigFields, section: Mapping[str, Any]) -> Llama3Scaling:
    low = fields.number("low_freq_factor", 1.0, section)
    return Llama3Scaling(
        fields.number("factor", 8.0, section),
        low,
        fields.number("high_freq_factor", 4.0, section, above=low),
        _original(fields, section, 8192),
    )


def _yarn(
    fields: ConfigFields,
    section: Mapping[str, Any],
    theta: float,
    rotary_columns: int,
    context: int,
) -> Rotation:
    original = _original(fields, section, context)
    factor = fields.number("factor", max(context / original, 1.0), section)
    scaling = YarnScaling(
        factor,
        original,
        fields.number("beta_fast", 32.0, section),
        fields.number("beta_slow", 1.0, section),
        bool(section.get("truncate", True)),
        theta,
    )
    default = sharpened(factor, 1.0)
    if section.get("mscale") and section.get("mscale_all_dim"):
        weight = fields.number("mscale", 1.0, section)
        weight_of_all = fields.number("mscale_all_dim", 1.0, section)
        default = sharpened(factor, weight) / sharpened(factor, weight_of_all)
    return Rotation(
        theta, scaling, rotary_columns, fields.number("attention_factor", default, section)
    )


def sharpened(factor: float, weight: float) -> float:
    """Return YaRN's factor of queries and keys for a context stretched by `factor`."""
    if factor > 1.0:
        return 1.0 + 0.1 * weight * math.log(factor)
    return 1.0


def _long(
    fields: ConfigFields,
    section: Mapping[str, Any],
    theta: float,
    columns: int,
    head_dim: int,
    context: int,
) -> Rotation:
    original = _original(
        fields, section, fields.number("original_max_position_embeddings", context)
    )
    factor = fields.number("factor", context / original, section)
    default = 1.0
    if factor > 1.0:
        default = math.sqrt(1 + math.log(factor) / math.log(original))
    scaling = LongRopeScaling(
        fields.numbers("short_factor", columns // 2, section),
        fields.numbers("long_factor", columns // 2, section),
        original,
    )
    magnitude = fields.number("attention_factor", default, section)
    rotary_columns = 0 if columns == head_dim else columns
    return Rotation(theta, scaling, rotary_columns, magnitude)
