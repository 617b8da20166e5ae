"""Reads the experts of a mixture from config.json. Imports no torch."""

from dataclasses import dataclass, replace

from localchat.errors import ModelInvalid
from localchat_cuda.architectures.family import Family
from localchat_cuda.config.fields import ConfigFields
from localchat_cuda.config.quantization import PACKED_GROUPS, Quantization

MAX_EXPERTS = 1023
"""Experts of a layer. The router (kernels/experts/choice.py) has a row for each and one for a shared gate."""
CLAMPED_SLOPE = 1.702
"""Slope of the only supported clamped activation."""
EXPERT_FORMS = "experts support bf16, fp16 and 4-bit integers without act-order"


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts of a layer. Each token goes through some of them."""

    experts: int
    chosen: int
    """Experts that the router chooses for a token."""
    normalized: bool
    """The weights of the chosen ones add up to 1."""
    shared: int = 0
    """Width of the shared expert, which every token goes through, in experts; 0: no shared expert."""
    gated: bool = False
    """Tokens weigh the shared expert by a gate."""
    biased: bool = False
    """The router and the experts have biases."""
    limit: float = 0.0
    """Clamp of gate and up (kernels/activation.py); 0.0: the activation is SiLU."""
    gelu: bool = False
    """The activation is GELU."""
    sigmoid: bool = False
    """The weights of experts are sigmoids of their logits. A correction changes which are chosen."""
    scale: float = 1.0
    """Factor of the weights of the chosen experts."""
    dense: tuple[bool, ...] = ()
    """Whether each layer has an MLP instead of experts; empty: all have experts."""
    dense_columns: int = 0
    """Columns inside the MLP of a layer without experts."""

    def keep(self, layers: tuple[int, ...]) -> "Mixture":
        """Return the data of some layers."""
        if not self.dense:
            return self
        return replace(self, dense=tuple(self.dense[n] for n in layers))

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
    family: Family,
    quantization: Quantization | None,
    *,
    gelu: bool,
) -> Mixture:
    """Read the experts of a layer. Raises ModelInvalid for forms without a kernel."""
    raw = fields.raw
    names = family.names.experts
    traits = family.experts
    assert names is not None
    if traits.beside_dense:
        return _read_beside_dense(fields, family, quantization, gelu=gelu)
    if gelu:
        raise fields.unsupported("experts with another activation than SiLU")
    if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
        raise fields.unsupported("layers with and without experts")
    if raw.get("use_sliding_window") and not traits.windowed:
        raise fields.unsupported("sliding windows in a mixture of experts")
    if quantization is not None and not family.gated_feed:
        raise fields.unsupported(
            f"experts quantized as {quantization.label} ({traits.fixed_formats})"
        )
    if quantization is not None:
        _check_quantization(fields, quantization, mxfp4=traits.clamped)
    if family.latent or names.correction:
        return _read_routed(fields, family, sigmoid=bool(names.correction))
    field = "num_experts" if "num_experts" in raw else "num_local_experts"
    experts = fields.integer(field)
    chosen = fields.integer("num_experts_per_tok")
    _check_count(fields, experts, chosen)
    if traits.clamped:
        limit = fields.number("swiglu_limit", 7.0)
        slope = fields.number("swiglu_alpha", 1.702)
        if slope != CLAMPED_SLOPE:
            raise fields.unsupported(f"experts whose gates have a slope of {slope}")
        return Mixture(experts, chosen, normalized=True, biased=True, limit=limit)
    gated = bool(names.shared_gate)
    width_field = "shared_expert_intermediate_size" if gated else "shared_intermediate_size"
    shared = 0
    if gated or (names.shared is not None and raw.get(width_field)):
        shared = _shared_width(fields, family, width_field)
    normalized = traits.normalized or bool(raw.get("norm_topk_prob", False))
    return Mixture(experts, chosen, normalized, shared, gated)


def _shared_width(fields: ConfigFields, family: Family, field: str) -> int:
    """Return the width of a shared expert in experts. Raises ModelInvalid unless they divide it."""
    inner = fields.integer(family.intermediate_field)
    width = fields.integer(field)
    if width % inner:
        raise fields.unsupported(
            f"a shared expert of {width} columns, which is not a multiple of {inner}"
        )
    return width // inner


def _check_quantization(fields: ConfigFields, quantization: Quantization, *, mxfp4: bool) -> None:
    """Raise ModelInvalid for formats without a kernel. `mxfp4`: no other format has one."""
    if mxfp4 and quantization.method == "mxfp4":
        _check_mxfp4(fields)
    elif mxfp4 or not quantization.packed or quantization.act_order:
        label = quantization.label
        if quantization.act_order:
            label = f"{label} with act-order"
        raise fields.unsupported(f"experts quantized as {label} ({EXPERT_FORMS})")


def _read_routed(fields: ConfigFields, family: Family, *, sigmoid: bool) -> Mixture:
    """Read experts as DeepSeek-V2 names them, which some layers do not have."""
    raw = fields.raw
    experts = fields.integer("n_routed_experts")
    chosen = fields.integer("num_experts_per_tok")
    _check_count(fields, experts, chosen)
    scoring = "sigmoid" if sigmoid else "softmax"
    if raw.get("scoring_func") not in (None, scoring):
        raise fields.unsupported(f"experts weighed by {raw['scoring_func']}")
    normalized = bool(raw.get("norm_topk_prob"))
    if normalized and not sigmoid:
        raise fields.unsupported("weights of experts that add up to 1")
    grouped = sigmoid or raw.get("topk_method") == "group_limited_greedy"
    if grouped and (raw.get("topk_group") or 1) < (raw.get("n_group") or 1):
        raise fields.unsupported("experts chosen from some groups")
    if raw.get("moe_latent_size"):
        raise fields.unsupported("experts over a latent")
    shared = 0
    if raw.get("n_shared_experts"):
        shared = fields.integer("n_shared_experts")
    width = raw.get("moe_shared_expert_intermediate_size")
    if shared and width is not None:
        shared = _shared_width(fields, family, "moe_shared_expert_intermediate_size")
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
    """Return whether each layer has an MLP instead of experts. Raises ModelInvalid."""
    raw = fields.raw
    layers = fields.integer("num_hidden_layers")
    kinds = fields.kinds_of_layers("mlp_layer_types", layers, ("dense", "sparse"))
    if kinds is not None:
        return tuple(kind == "dense" for kind in kinds)
    if raw.get("moe_layer_freq", 1) != 1:
        raise fields.unsupported("experts in some of the layers after the first ones")
    first = raw.get("first_k_dense_replace")
    if not isinstance(first, int) or first < 0:
        raise ModelInvalid(
            f"{fields.name}: first_k_dense_replace is {first!r}, not a usable number."
        )
    return tuple(layer < first for layer in range(layers))


def _read_beside_dense(
    fields: ConfigFields, family: Family, quantization: Quantization | None, *, gelu: bool
) -> Mixture:
    """Read experts beside a dense feed-forward layer."""
    if quantization is not None:
        raise fields.unsupported(
            f"experts quantized as {quantization.label} ({family.experts.fixed_formats})"
        )
    experts = fields.integer("num_experts")
    chosen = fields.integer("top_k_experts")
    _check_count(fields, experts, chosen)
    return Mixture(experts, chosen, normalized=True, gelu=gelu)


def _check_count(fields: ConfigFields, experts: int, chosen: int) -> None:
    """Raise ModelInvalid if the router cannot choose this many experts."""
    if not chosen <= experts <= MAX_EXPERTS:
        raise fields.unsupported(f"{chosen} of {experts} experts (at most {MAX_EXPERTS})")


def _check_mxfp4(fields: ConfigFields) -> None:
    """Raise ModelInvalid for columns that groups of 32 do not divide."""
    for field in ("hidden_size", "intermediate_size"):
        columns = fields.integer(field)
        if columns % PACKED_GROUPS[-1]:
            raise fields.unsupported(f"MXFP4 with {field} {columns}, which is not a multiple of 32")
