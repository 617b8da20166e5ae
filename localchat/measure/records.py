"""Results of benchmarks and quality tests: machine, models, settings and all measured figures.

The field names are the keys of `--json`.
"""

import datetime
import platform
from typing import Literal

import msgspec

from localchat import __version__
from localchat.fit.contention import BUSY_SHARE
from localchat.fit.hardware import Machine
from localchat.measure.sweep import Point, ServedVariant, SweepSpec
from localchat.measure.variants import BenchVariant


def now() -> str:
    """Return the local time in ISO 8601."""
    return datetime.datetime.now(datetime.UTC).astimezone().isoformat(timespec="seconds")


class MachineRecord(msgspec.Struct, frozen=True):
    """Hardware and system that decide the speed of a machine."""

    cpu: str
    cores: int
    ram_bytes: int
    gpus: tuple[str, ...]
    system: str

    @classmethod
    def of(cls, machine: Machine) -> "MachineRecord":
        """Describe a machine."""
        gpus = tuple(gpu.name for gpu in machine.gpus)
        system = f"{platform.system()} {platform.machine()}"
        return cls(machine.cpu_name, machine.cores, machine.ram_total_bytes, gpus, system)


class MeasureRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Header that all results share."""

    version: Literal[1] = 1
    at: str
    """Start time, ISO 8601."""
    localchat: str = __version__
    machine: MachineRecord


class BenchRecord(MeasureRecord, frozen=True, kw_only=True):
    """Result of a benchmark."""

    spec: SweepSpec
    served: tuple[ServedVariant, ...]
    points: tuple[Point, ...]
    complete: bool = True
    """False if the benchmark was interrupted."""
    others_share: float = 0.0
    """Share of the CPU that other programs used meanwhile; 0 if unknown."""

    @property
    def disturbed(self) -> bool:
        """True if other programs used much of the CPU."""
        return self.others_share >= BUSY_SHARE


class PerplexityFigures(msgspec.Struct, frozen=True):
    """Perplexity of a text, as llama-perplexity defines it."""

    perplexity: float
    margin: float
    """Standard error of the perplexity."""
    tokens: int
    """Scored tokens: the second half of each window."""
    bits_per_byte: float
    """Comparable between models with different tokenizers."""


class DivergenceFigures(msgspec.Struct, frozen=True):
    """Distance of the token probabilities from those of the first model."""

    kl_mean: float
    """Mean KL divergence per token, in nats."""
    kl_p99: float
    kl_max: float
    same_top_share: float
    """Share of positions where both models rank the same token first."""
    complete: bool
    """False for a lower bound, which covers only the top tokens."""
    delta_p_rms: float | None = None
    """Root mean square of the change in the probability of the text's own tokens."""


class TaskOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """Outcome of one task."""

    name: str
    passed: bool
    answer: str = ""
    """Start of the answer."""
    length: int = 0
    """Length of a needle's text, in tokens."""
    depth: float = 0.0
    """Position of a needle: 0 is the start of the text, 1 its end."""


class VariantQuality(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All figures of one variant.

    Size: a column of the table for each figure.
    """

    variant: BenchVariant
    model: str
    backend: str = ""
    quantization: str = ""
    kv_type: str = ""
    file_bytes: int = 0
    context_tokens: int = 0
    perplexity: PerplexityFigures | None = None
    divergence: DivergenceFigures | None = None
    """Distance from the first variant, which has none."""
    json: tuple[TaskOutcome, ...] = ()
    tools: tuple[TaskOutcome, ...] = ()
    needles: tuple[TaskOutcome, ...] = ()
    questions: tuple[TaskOutcome, ...] = ()
    tokens_per_s: float | None = None
    """Decode rate of a single answer, the best of a few. None if it was not measured."""
    left_out: tuple[str, ...] = ()
    """Skipped tests, with the reason."""


class QualitySpec(msgspec.Struct, frozen=True, kw_only=True):
    """Tests to run, and on which variants."""

    variants: tuple[BenchVariant, ...]
    tests: tuple[str, ...]
    text: str
    """Name of the text."""
    text_digest: str
    window_tokens: int
    most_windows: int
    """Limit on the windows of the text; 0 for no limit."""
    needle_lengths: tuple[int, ...]
    needle_depths: int
    tasks: int
    """Number of JSON tasks, and of tool tasks."""
    questions: str = ""
    """Name of the questions file."""


class QualityRecord(MeasureRecord, frozen=True, kw_only=True):
    """Result of a quality comparison."""

    spec: QualitySpec
    measured: tuple[VariantQuality, ...]
    verdicts: tuple[str, ...] = ()
    complete: bool = True
    """False if the comparison was interrupted."""
    others_share: float = 0.0
    """Share of the CPU that other programs used meanwhile; 0 if unknown."""
