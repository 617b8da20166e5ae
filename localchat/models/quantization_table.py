"""Compares the quantizations of one model on a machine, and recommends one."""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from localchat.errors import LocalchatError
from localchat.fit.hardware import Machine
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import usual_bits
from localchat.fit.speed import SpeedHistory
from localchat.model_files.architecture import ModelShape
from localchat.models.assess import ExpectedSpeed, FitReport, Subject, assess
from localchat.models.catalog import Catalog
from localchat.models.names import parse
from localchat.models.published_shapes import published_model

USUAL_LOSS: Final = {
    "Q8_0": 0.04,
    "Q6_K": 0.35,
    "Q5_K_M": 0.9,
    "Q4_K_M": 2.8,
    "Q3_K_M": 10.5,
    "Q2_K": 56.0,
}
"""Increase of the perplexity over F16 in percent, for Llama 3 8B on Wikitext-2 without an importance matrix.

Measured by llama.cpp's authors (examples/perplexity/README.md). Large models lose less, small ones more.
"""
_MAX_LOSS: Final = 5.0
_MAX_LOSS_OF_LARGE: Final = 11.0
"""Loss above which a smaller model in a finer quantization answers better."""
_LARGE_MODEL: Final = 25_000_000_000
"""Parameters from which a model loses about half of the usual (Llama 2 70B: Q3_K_M 4.7 %)."""
_SMALL_MODEL: Final = 3_000_000_000
"""Parameters below which a model loses more than usual, so that Q8_0 is worth its size."""
_CHAT_TOKENS: Final = 4096
"""Context that a recommended quantization must have room for."""
_READING_TOKENS_PER_S: Final = 10.0
"""Twice the rate at which people read. Below it, speed counts more than a small loss."""


class QuantizationRow(NamedTuple):
    """A quantization of a model on a machine."""

    quantization: str
    model: str
    """Name for `localchat pull`. Empty for a model that the catalogue does not have."""
    size_bytes: int
    parameters: int
    report: FitReport
    recommended: bool = False

    @property
    def loss_percent(self) -> float:
        """Usual increase of the perplexity over the unquantized model."""
        return USUAL_LOSS[self.quantization]

    @property
    def fits_a_chat(self) -> bool:
        """Whether it fits with room for a conversation."""
        plan = self.report.plan
        shortest = min(_CHAT_TOKENS, plan.context_tokens)
        return plan.fits and plan.max_context_tokens >= shortest

    @property
    def is_worth_it(self) -> bool:
        """Whether it answers better than a smaller model of the same size in bytes."""
        limit = _MAX_LOSS_OF_LARGE if self.parameters >= _LARGE_MODEL else _MAX_LOSS
        return self.loss_percent <= limit

    @property
    def gains_nothing(self) -> bool:
        """Whether the next coarser quantization answers as well, which holds for Q8_0 of a large model."""
        return self.quantization == "Q8_0" and self.parameters >= _SMALL_MODEL

    @property
    def speed(self) -> ExpectedSpeed | None:
        """Expected decode speed. None if unknown or if it does not fit."""
        return self.report.expected_speed

    def record(self) -> dict[str, Any]:
        """Return the fields of `--json`."""
        plan = self.report.plan
        speed = self.speed
        return {
            "quantization": self.quantization,
            "model": self.model or None,
            "size_bytes": self.size_bytes,
            "total_bytes": plan.total_bytes,
            "fits": plan.fits,
            "context_tokens": plan.context_tokens if plan.fits else None,
            "max_context_tokens": plan.max_context_tokens if plan.fits else None,
            "expected_tokens_per_s": speed.tokens_per_s if speed else None,
            "usual_loss_percent": self.loss_percent,
            "recommended": self.recommended,
        }


def quantization_rows(
    subject: Subject,
    options: LoadOptions,
    machine: Machine,
    history: SpeedHistory | None,
    catalog: Catalog,
) -> tuple[QuantizationRow, ...]:
    """Plan a GGUF model in every usual quantization, finest first, and mark the recommended one.

    Empty for other formats, and for embedding models, whose usual loss is unknown. Sizes of quantizations other
    than the subject's own are estimates within a few percent.
    """
    shape = subject.model
    if not isinstance(shape, ModelShape) or shape.pooling:
        return ()
    rows = list(_rows(subject, shape, options, machine, history, catalog))
    best = _recommended(rows)
    return tuple(row._replace(recommended=row is best) for row in rows)


def _rows(
    subject: Subject,
    shape: ModelShape,
    options: LoadOptions,
    machine: Machine,
    history: SpeedHistory | None,
    catalog: Catalog,
) -> Iterator[QuantizationRow]:
    for quantization in USUAL_LOSS:
        model, other = _quantized(subject.name, shape, quantization, catalog)
        if other is None:
            continue
        is_subject = quantization == shape.quantization
        path = subject.path if is_subject else None
        candidate = Subject(model or subject.name, other, path, subject.backend)
        try:
            report = assess(candidate, options, machine, history)
        except LocalchatError:
            # Options that suit the subject may be impossible for another file, such as a list of tensors.
            continue
        yield QuantizationRow(quantization, model, other.weights_bytes, shape.parameters, report)


def _quantized(
    name: str, shape: ModelShape, quantization: str, catalog: Catalog
) -> tuple[str, ModelShape | None]:
    """Return the catalogue's name for a quantization, or "", and its shape, or None if it is unknown."""
    try:
        reference = parse(name, catalog)
    except LocalchatError:
        reference = None
    model = ""
    if reference is not None and reference.entry is not None:
        model = f"{reference.entry.name}-{quantization.lower()}"
    if quantization == shape.quantization:
        return model, shape
    if reference is not None:
        published = published_model(reference._replace(format="gguf", quantization=quantization))
        if isinstance(published, ModelShape):
            return model, published
    return model, _scaled(shape, quantization)


def _scaled(shape: ModelShape, quantization: str) -> ModelShape | None:
    """Return the shape with weights of another size. None if it would be finer than the file itself."""
    bits = usual_bits(quantization)
    assert bits is not None
    share = shape.parameters * bits / 8 / max(shape.weights_bytes, 1)
    source_bits = usual_bits(shape.quantization)
    if source_bits is None and share > 1:
        # A file of unusual bits, such as MXFP4: what its makers would publish in 8 bits is unknown.
        return None
    return shape.scaled(quantization, share)


def _recommended(rows: list[QuantizationRow]) -> QuantizationRow | None:
    """Choose the finest quantization that answers fast enough, else the coarsest without a large loss.

    None if only quantizations with a large loss fit, because a smaller model is the better choice then.
    """
    usable = [row for row in rows if row.fits_a_chat and row.is_worth_it]
    for row in usable:
        speed = row.speed
        if row.gains_nothing or speed is None:
            continue
        if speed.tokens_per_s >= _READING_TOKENS_PER_S:
            return row
    return usable[-1] if usable else None
