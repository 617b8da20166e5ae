"""Reads the experts of a mixture from config.json. Imports no torch."""

from dataclasses import dataclass

from localchat_cuda.config_fields import ConfigFields
from localchat_cuda.quantization_config import PACKED_GROUPS, Quantization
from localchat_cuda.supported_architectures import GATED, GRANITES, WIDTHS, Architecture

MAX_EXPERTS = 1023
"""Of a layer: a row for each in the router (kernels/experts/choice.py), and one for a shared expert's gate."""
CLAMPED_SLOPE = 1.702
"""Of the only clamped activation that there is."""
EXPERT_FORMS = "experts are possible in bf16, fp16 and 4 bits without act-order"
BESIDE_DENSE_FORMS = "experts beside a dense layer are possible in bf16 and fp16"


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts of a layer, of which each token goes through some."""

    experts: int
    chosen: int
    """Of one token."""
    normalized: bool
    """The weights of the chosen ones add up to 1."""
    shared: int = 0
    """Experts that a shared one, which every token goes through, is as wide as; 0: there is none."""
    gated: bool = False
    """Tokens weigh the shared expert by a gate."""
    biased: bool = False
    """The router and the experts have biases."""
    limit: float = 0.0
    """Gate and up are clamped to it (kernels/activation.py); 0.0: the activation is SiLU."""
    gelu: bool = False
    """The activation is GELU."""

    @property
    def stored(self) -> int:
        """Experts in memory."""
        return self.experts + self.shared

    @property
    def taken(self) -> int:
        """Experts that one token reads."""
        return self.chosen + self.shared


def read_mixture(
    fields: ConfigFields,
    architecture: Architecture,
    quantization: Quantization | None,
    *,
    gelu: bool,
) -> Mixture:
    """The experts of a layer. Raises ModelInvalid for forms that no kernel here has."""
    raw = fields.raw
    if architecture == "gemma4":
        return _read_gemma4(fields, quantization, gelu=gelu)
    if gelu:
        raise fields.unsupported("experts with another activation than SiLU")
    dense = raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1
    if dense:
        raise fields.unsupported("layers with and without experts")
    if architecture != "mixtral" and raw.get("use_sliding_window"):
        raise fields.unsupported("sliding windows in a mixture of experts")
    clamped = architecture == "gpt_oss"
    if quantization is not None and quantization.method == "mxfp4" and clamped:
        _check_mxfp4(fields)
    elif quantization is not None and (
        clamped or not quantization.packed or quantization.act_order
    ):
        order = " with act-order" if quantization.act_order else ""
        raise fields.unsupported(
            f"experts quantized as {quantization.label}{order} ({EXPERT_FORMS})"
        )
    field = "num_experts" if "num_experts" in raw else "num_local_experts"
    experts, chosen = fields.integer(field), fields.integer("num_experts_per_tok")
    _check_count(fields, experts, chosen)
    shared, gated = 0, architecture in GATED
    width_field = "shared_expert_intermediate_size" if gated else "shared_intermediate_size"
    if gated or (architecture in GRANITES and raw.get(width_field)):
        inner = fields.integer(WIDTHS.get(architecture, "intermediate_size"))
        width = fields.integer(width_field)
        shared, rest = divmod(width, inner)
        if rest:
            raise fields.unsupported(
                f"a shared expert of {width} columns, which are no multiple of {inner}"
            )
    if clamped:
        limit, slope = fields.number("swiglu_limit", 7.0), fields.number("swiglu_alpha", 1.702)
        if slope != CLAMPED_SLOPE:
            raise fields.unsupported(f"experts whose gates have a slope of {slope}")
        return Mixture(experts, chosen, normalized=True, biased=True, limit=limit)
    always = architecture in ("mixtral", "qwen3_5_moe", *GRANITES)
    normalized = always or bool(raw.get("norm_topk_prob", False))
    return Mixture(experts, chosen, normalized, shared, gated)


def _read_gemma4(fields: ConfigFields, quantization: Quantization | None, *, gelu: bool) -> Mixture:
    """Experts beside a dense feed-forward layer."""
    if quantization is not None:
        raise fields.unsupported(
            f"experts quantized as {quantization.label} ({BESIDE_DENSE_FORMS})"
        )
    experts, chosen = fields.integer("num_experts"), fields.integer("top_k_experts")
    _check_count(fields, experts, chosen)
    return Mixture(experts, chosen, normalized=True, gelu=gelu)


def _check_count(fields: ConfigFields, experts: int, chosen: int) -> None:
    """Raise ModelInvalid for more experts than a router has, or than there are."""
    if not chosen <= experts <= MAX_EXPERTS:
        raise fields.unsupported(f"{chosen} of {experts} experts (at most {MAX_EXPERTS})")


def _check_mxfp4(fields: ConfigFields) -> None:
    """Raise ModelInvalid for columns that groups of 32 do not divide."""
    for field in ("hidden_size", "intermediate_size"):
        if fields.integer(field) % PACKED_GROUPS[-1]:
            raise fields.unsupported(
                f"MXFP4 with {field} {fields.integer(field)}, no multiple of 32"
            )
