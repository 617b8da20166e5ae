"""Reads the widths of multi-head latent attention from config.json. Imports no torch.

DeepSeek-V2 (arXiv 2405.04434); the fields are those of transformers.
"""

from dataclasses import dataclass

from localchat_cuda.config.fields import ConfigFields
from localchat_cuda.config.rope import sharpened

KV_RANKS = (128, 256, 512)
ROPES = (16, 32, 64)
"""Columns of a latent and of a rotated key that the kernels support. Together they are wider than heads of the
prefill kernel for Hopper, which does not support latents."""
EPS = 1e-6
"""Epsilon of the norms of latents, whatever other norms have."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Widths of one layer's attention; all layers have the same."""

    kv_rank: int
    """Columns of the latent of keys and values."""
    rope: int
    """Columns of the rotated key, and as many of each query head."""
    plain: int
    """Other columns of a query head."""
    value: int
    """Columns of a head's values."""
    query_rank: int
    """Columns of the latent of queries; 0: queries have none."""
    scale: float
    """Scale of the attention's logits."""
    neighbours: bool
    """Columns of a rotated pair are neighbors, not half of the columns apart."""

    @property
    def row(self) -> int:
        """Columns of a token in the cache."""
        return self.kv_rank + self.rope

    def kv(self, heads: int) -> int:
        """Return the number of weights that make keys and values of a latent."""
        return heads * (self.plain + self.value) * self.kv_rank

    def queries(self, heads: int) -> int:
        """Return the columns of the queries of all heads."""
        return heads * (self.plain + self.rope)


def read_latent(fields: ConfigFields) -> LatentAttention:
    """Read the widths of a config. Raises ModelInvalid for widths without a kernel."""
    kv_rank = fields.integer("kv_lora_rank")
    rope = fields.integer("qk_rope_head_dim")
    fields.check_columns(kv_rank, "latents", KV_RANKS)
    fields.check_columns(rope, "rotated keys", ROPES)
    plain = fields.integer("qk_nope_head_dim")
    query_rank = 0
    if fields.raw.get("q_lora_rank") is not None:
        query_rank = fields.integer("q_lora_rank")
    return LatentAttention(
        kv_rank,
        rope,
        plain,
        fields.integer("v_head_dim"),
        query_rank,
        (plain + rope) ** -0.5 * _sharpening(fields) ** 2,
        bool(fields.raw.get("rope_interleave", True)),
    )


def _sharpening(fields: ConfigFields) -> float:
    """Return the factor by which YaRN multiplies all columns of queries and keys."""
    section = fields.section("rope_parameters") or fields.section("rope_scaling")
    kind = section.get("rope_type") or section.get("type") or "default"
    if kind == "default" or not section.get("mscale_all_dim"):
        return 1.0
    return sharpened(
        fields.number("factor", 1.0, section), fields.number("mscale_all_dim", 0.0, section)
    )
