"""Compares the quantizations of one model on a machine, and recommends one."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from msgspec import structs

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
from localchat.models.quantizations import DEFAULT_QUANTIZATION, canonical

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
_SOURCE_BITS: Final = 8
"""Bits per weight from which a file may be quantized again."""
_CHAT_TOKENS: Final = 4096
"""Context that a recommended quantization must have room for."""
QUICK_TOKENS_PER_S: Final = 25.0
"""Rate from which answers feel immediate. Below it, speed counts more than a small loss."""


class QuantizationRow(NamedTuple):
    """A quantization of a model on a machine."""

    quantization: str
    model: str
    """Name for `localchat pull`. Empty if no repository is known to offer it."""
    shape: ModelShape
    subject: Subject
    report: FitReport
    chat_tokens: int
    """Context that a conversation needs: the one that the user chose, or a short one."""
    recommended: bool = False

    @property
    def size_bytes(self) -> int:
        """Size of its weights."""
        return self.shape.weights_bytes

    @property
    def loss_percent(self) -> float:
        """Usual increase of the perplexity over the unquantized model."""
        return USUAL_LOSS[self.quantization]

    @property
    def fits_a_chat(self) -> bool:
        """Whether it fits with room for a conversation."""
        plan = self.report.plan
        return plan.fits and plan.max_context_tokens >= self.chat_tokens

    @property
    def is_worth_it(self) -> bool:
        """Whether it answers better than a smaller model of the same size in bytes."""
        return self.loss_percent <= _MAX_LOSS or self.loses_half

    @property
    def loses_half(self) -> bool:
        """Whether only the size of the model makes its usual loss bearable."""
        is_large = self.shape.parameters >= _LARGE_MODEL
        return is_large and _MAX_LOSS < self.loss_percent <= _MAX_LOSS_OF_LARGE

    @property
    def gains_nothing(self) -> bool:
        """Whether the next coarser quantization answers as well, which holds for Q8_0 of a large model."""
        return self.quantization == "Q8_0" and self.shape.parameters >= _SMALL_MODEL

    @property
    def is_quick(self) -> bool:
        """Whether its answers feel immediate."""
        return self.speed is not None and self.speed.tokens_per_s >= QUICK_TOKENS_PER_S

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
    listed: Mapping[str, str] = MappingProxyType({}),
) -> tuple[QuantizationRow, ...]:
    """Plan a GGUF model in its quantizations, finest first, and mark the recommended one.

    listed: names for `localchat pull` by quantization, as the model's repository lists them. Without a list,
    the catalogue's are used. A file of neither has rows for the quantizations that `quantize` can make of it.
    Empty for other formats, and for embedding models, whose usual loss is unknown. Sizes of quantizations other
    than the subject's own are estimates within a few percent.
    """
    shape = subject.model
    if not isinstance(shape, ModelShape) or shape.pooling:
        return ()
    rows = []
    chat_tokens = options.context_tokens or min(_CHAT_TOKENS, shape.context_train)
    names = listed or offered_names(subject.name, catalog)
    for quantization in USUAL_LOSS:
        model = names.get(quantization, "")
        candidate = subject
        other = shape
        if quantization != shape.quantization:
            if not (model or (not names and _can_be_made(quantization, shape))):
                continue
            quantized = _quantized(subject.name, shape, quantization, catalog)
            if quantized is None:
                continue
            other = quantized
            candidate = Subject(model or subject.name, other, None, subject.backend)
        report = _roomiest(candidate, options, machine, history, chat_tokens)
        if report is not None:
            row = QuantizationRow(quantization, model, other, candidate, report, chat_tokens)
            rows.append(row)
    best = _recommended(rows)
    return tuple(row._replace(recommended=row is best) for row in rows)


def _roomiest(
    subject: Subject,
    options: LoadOptions,
    machine: Machine,
    history: SpeedHistory | None,
    chat_tokens: int,
) -> FitReport | None:
    """Return the report of a load. None if the options are impossible.

    If the planned context does not fit or is shorter than `chat_tokens`, a load of one slot with that context
    may fit.
    """
    try:
        report = assess(subject, options, machine, history)
        is_roomy = report.plan.fits and report.plan.max_context_tokens >= chat_tokens
        if is_roomy or options.context_tokens is not None:
            return report
        chat = structs.replace(options, context_tokens=chat_tokens, max_slots=1)
        shorter = assess(subject, chat, machine, history)
    except LocalchatError:
        # Options that suit one file may be impossible for another, such as a list of tensors.
        return None
    if shorter.plan.fits:
        return shorter
    return report


def offered_names(name: str, catalog: Catalog) -> dict[str, str]:
    """Return the names for `localchat pull` of a catalogue model's GGUF files, by quantization."""
    try:
        entry = parse(name, catalog).entry
    except LocalchatError:
        entry = None
    if entry is None:
        return {}
    return {
        canonical(quantization): f"{entry.name}-{quantization.lower()}"
        for source in entry.sources
        if source.format == "gguf"
        for quantization in source.quantizations
    }


def _can_be_made(quantization: str, shape: ModelShape) -> bool:
    """Return True if a file can be written in this quantization without much more loss."""
    source_bits = usual_bits(shape.quantization)
    bits = usual_bits(quantization)
    return source_bits is not None and bits is not None and source_bits > max(bits, _SOURCE_BITS)


def _quantized(
    name: str, shape: ModelShape, quantization: str, catalog: Catalog
) -> ModelShape | None:
    """Return the shape of a model in another quantization. None if it is unknown."""
    try:
        reference = parse(name, catalog)
    except LocalchatError:
        return _scaled(shape, quantization)
    published = published_model(reference._replace(format="gguf", quantization=quantization))
    if isinstance(published, ModelShape):
        return published
    return _scaled(shape, quantization)


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


def _recommended(rows: Sequence[QuantizationRow]) -> QuantizationRow | None:
    """Choose the finest quantization that is quick, else the default or a coarser one.

    None if only quantizations with a large loss fit, because a smaller model is the better choice then.
    """
    usable = [row for row in rows if row.fits_a_chat and row.is_worth_it]
    if not usable:
        return None
    usual_loss = USUAL_LOSS[DEFAULT_QUANTIZATION]
    quick = [
        row
        for row in usable
        if row.is_quick and not row.gains_nothing and row.loss_percent <= usual_loss
    ]
    coarse = [row for row in usable if row.loss_percent >= usual_loss]
    return (quick or coarse or usable[-1:])[0]
