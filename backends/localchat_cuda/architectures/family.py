"""Data of a model family: classes in config.json, defaults, names of tensors, and traits.

Imports no torch, because the memory plan reads families before torch is loaded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from localchat_cuda.architectures.names import Names

QkvBias = Literal["never", "always", "required", "optional"]
"""Biases on queries, keys and values. "required": config.json must state them. "optional": it may."""
Windows = Literal["never", "all", "late", "pattern"]
"""Layers with a sliding window, if config.json does not list them. "late": those from `max_window_layers` on.
"pattern": all but every `sliding_window_pattern`-th."""
UnrotatedBy = Literal["", "no_rope_layers", "position_embedding_type", "class"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTraits:
    """Traits of a family's experts that their names do not show."""

    normalized: bool = False
    """The weights of the chosen experts always add up to 1, whatever `norm_topk_prob` says."""
    clamped: bool = False
    """Gate and up are clamped, and the router and the experts have biases."""
    beside_dense: bool = False
    """Experts add to a dense feed-forward layer instead of replacing it."""
    windowed: bool = False
    """Layers may have sliding windows."""
    switch: str = ""
    """Field that is true only in configs with experts; empty: all configs have experts."""
    fixed_formats: str = ""
    """Formats of experts that cannot be rounded at the load, for the error; empty: they can be rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTraits:
    """Differences between llama.cpp's GGUF files of a family and those of a Llama."""

    architecture: str = ""
    """Name in `general.architecture`; empty: that of the family."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Checkpoint names by those of the file, without `blk.N.` and, in most cases, the suffix."""
    merged: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Linear layers that the file stores apart, and a checkpoint merged."""
    paired_rows: bool = False
    """Rows of queries and keys are reordered, because llama.cpp rotates neighboring columns."""
    partial_rotation: bool = False
    """Only the first `rope.dimension_count` columns of a head rotate."""
    space_kept_after: tuple[str, ...] = ()
    """Control tokens after which white space is kept, while the others strip it; empty: none strips it."""
    largest_layers: int = 0
    """Layers of the family's largest model, which scales attention by hidden columns per head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Data of a model family.

    Size: one field for each trait that config.json leaves to the class of the model."""

    name: str
    """Name in `ModelInfo.architecture`. Most GGUF files have the same in `general.architecture`."""
    classes: tuple[str, ...]
    """Names in `architectures` of config.json."""
    label: str = ""
    """Models of the family, as messages list them; empty if another family's label covers them."""
    names: Names
    """Checkpoint names of the tensors."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of transformers: configs on the hub leave such fields out."""
    with_experts: str = ""
    """Family of configs with the same class whose `num_local_experts` is not 0."""
    gguf: GgufTraits | None = None
    """None: GGUF files of the family are not supported."""

    intermediate_field: str = "intermediate_size"
    """Field with the columns inside the MLP, or inside one expert."""
    qkv_bias: QkvBias = "never"
    windows: Windows = "never"
    window_switch: bool = False
    """Windows count only if `use_sliding_window` is true."""
    attention_scale: float = 0.0
    """Scale of the attention's logits; 0.0: `scale_field` or 1/sqrt(head_dim) decides."""
    scale_field: str = ""
    """Field whose inverse square root is the attention's scale."""
    attention_cap_field: str = ""
    """Field with the soft cap of the attention's logits."""
    head_cap_field: str = ""
    """Field with the soft cap of the head's logits."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by sqrt(hidden)."""
    multipliers: bool = False
    """The config has factors of embeddings, attention, residual and logits, as Granite's."""
    unrotated_by: UnrotatedBy = ""
    """Field that names layers without rotations; empty: all layers rotate; "class": none does."""
    single_parts: bool = False
    """Each layer is attention, a running state or a feed-forward layer alone."""
    gated_feed: bool = True
    """MLP and experts multiply an activated gate with `up`. Otherwise they square the ReLU of `up`."""
    canonical: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    """Adds the fields that the reader knows to those of the family's own names; None: it has none."""
    experts: ExpertTraits = ExpertTraits()

    @property
    def has_delta_nets(self) -> bool:
        """True if most layers have a gated delta net, and attention has an output gate."""
        return self.names.recurrent is not None and self.names.recurrent.kind == "delta_net"

    @property
    def latent(self) -> bool:
        """True for multi-head latent attention."""
        return bool(self.names.kv)

    @property
    def post_normed(self) -> bool:
        """True if outputs of attention and MLP are normalized before they join the residual."""
        return "post_mlp" in self.names.norms

    @property
    def normed_projections(self) -> bool:
        """True if queries and keys are normalized over all heads. Inputs of layers are not."""
        return "attention" not in self.names.norms
