"""Reads the experts of a mixture from config.json. Imports no torch."""

from dataclasses import dataclass, replace

from localchat.errors import ModelInvalid
from localchat_cuda.config.fields import ConfigFields
from localchat_cuda.config.quantization import PACKED_GROUPS, Quantization
from localchat_cuda.supported_architectures import GATED, GRANITES, LATENTS, WIDTHS, Architecture

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
    sigmoid: bool = False
    """Experts weigh by the sigmoid of their logits, and are chosen with a correction of it."""
    scale: float = 1.0
    """Of the weights of chosen experts."""
    dense: tuple[bool, ...] = ()
    """By layer, whether it has no experts; empty: all have."""
    dense_columns: int = 0
    """Inside the MLP of such a layer."""

    def keep(self, layers: tuple[int, ...]) -> "Mixture":
        """The same of some layers."""
        return replace(self, dense=tuple(self.dense[n] for n in layers) if self.dense else ())

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
    if architecture in LATENTS:
        return _read_latents(fields, architecture)
    field = "num_experts" if "num_experts" in raw else "num_local_experts"
    experts = fields.integer(field)
    chosen = fields.integer("num_experts_per_tok")
    _check_count(fields, experts, chosen)
    shared = 0
    gated = architecture in GATED
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
        limit = fields.number("swiglu_limit", 7.0)
        slope = fields.number("swiglu_alpha", 1.702)
        if slope != CLAMPED_SLOPE:
            raise fields.unsupported(f"experts whose gates have a slope of {slope}")
        return Mixture(experts, chosen, normalized=True, biased=True, limit=limit)
    always = architecture in ("mixtral", "qwen3_5_moe", *GRANITES)
    normalized = always or bool(raw.get("norm_topk_prob", False))
    return Mixture(experts, chosen, normalized, shared, gated)


def _read_latents(fields: ConfigFields, architecture: Architecture) -> Mixture:
    """Experts with shared ones, after first layers without."""
    raw = fields.raw
    sigmoid = architecture == "glm4_moe_lite"
    experts = fields.integer("n_routed_experts")
    chosen = fields.integer("num_experts_per_tok")
    _check_count(fields, experts, chosen)
    if raw.get("scoring_func") not in (None, "sigmoid" if sigmoid else "softmax"):
        raise fields.unsupported(f"experts weighed by {raw['scoring_func']}")
    normalized = bool(raw.get("norm_topk_prob"))
    if normalized and not sigmoid:
        raise fields.unsupported("weights of experts that add up to 1")
    grouped = sigmoid or raw.get("topk_method") == "group_limited_greedy"
    if grouped and (raw.get("topk_group") or 1) < (raw.get("n_group") or 1):
        raise fields.unsupported("experts chosen from some groups")
    shared = fields.integer("n_shared_experts") if raw.get("n_shared_experts") else 0
    return Mixture(
        experts,
        chosen,
        normalized,
        shared,
        sigmoid=sigmoid,
        scale=fields.number("routed_scaling_factor", 1.0),
        dense=_dense_layers(fields),
        dense_columns=fields.integer("intermediate_size"),
    )


def _dense_layers(fields: ConfigFields) -> tuple[bool, ...]:
    raw = fields.raw
    layers = fields.integer("num_hidden_layers")
    kinds = raw.get("mlp_layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers or {*kinds} - {"dense", "sparse"}:
            raise ModelInvalid(f"{fields.name}: mlp_layer_types is no list of {layers} kinds.")
        return tuple(kind == "dense" for kind in kinds)
    if raw.get("moe_layer_freq", 1) != 1:
        raise fields.unsupported("experts in some of the layers after the first ones")
    first = raw.get("first_k_dense_replace")
    if not isinstance(first, int) or first < 0:
        raise ModelInvalid(f"{fields.name}: first_k_dense_replace is {first!r}, no usable number.")
    return tuple(layer < first for layer in range(layers))


def _read_gemma4(fields: ConfigFields, quantization: Quantization | None, *, gelu: bool) -> Mixture:
    """Experts beside a dense feed-forward layer."""
    if quantization is not None:
        raise fields.unsupported(
            f"experts quantized as {quantization.label} ({BESIDE_DENSE_FORMS})"
        )
    experts = fields.integer("num_experts")
    chosen = fields.integer("top_k_experts")
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
