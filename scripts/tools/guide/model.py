"""The guide's network in PyTorch: a small Qwen2. Only for training; inference runs elsewhere.

Shape letters: B rows, T tokens, C width, H query heads, K KV heads, D head dimension, F inner width, V
vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of the network; `width` and `inner` are multiples of 128 for group-wise
    quantization.
    """

    vocabulary: int = 4608
    width: int = 384
    layers: int = 8
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    inner: int = 1024
    context: int = 4096
    rope_base: float = 100_000.0
    norm_eps: float = 1e-6


class Norm(nn.Module):
    """RMSNorm over the last dimension, computed in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in the half-split form of Qwen2. x: (B, heads, T, D); cos, sin: (T, D/2)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Layer(nn.Module):
    """Attention with grouped KV heads, then SwiGLU; each follows a norm and is added to the residual
    stream.
    """

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        self.attn_norm = Norm(s.width, s.norm_eps)
        self.q = nn.Linear(s.width, s.heads * s.head_dim)
        self.k = nn.Linear(s.width, s.kv_heads * s.head_dim)
        self.v = nn.Linear(s.width, s.kv_heads * s.head_dim)
        self.o = nn.Linear(s.heads * s.head_dim, s.width, bias=False)
        self.ffn_norm = Norm(s.width, s.norm_eps)
        self.gate = nn.Linear(s.width, s.inner, bias=False)
        self.up = nn.Linear(s.width, s.inner, bias=False)
        self.down = nn.Linear(s.inner, s.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s, (B, T, _) = self.shape, x.shape
        h = self.attn_norm(x)
        q = rotate(
            self.q(h).view(B, T, s.heads, s.head_dim).transpose(1, 2), cos, sin
        )  # (B, H, T, D)
        k = rotate(
            self.k(h).view(B, T, s.kv_heads, s.head_dim).transpose(1, 2), cos, sin
        )  # (B, K, T, D)
        v = self.v(h).view(B, T, s.kv_heads, s.head_dim).transpose(1, 2)
        group = s.heads // s.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)  # (B, H, T, D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, s.heads * s.head_dim))
        h = self.ffn_norm(x)
        fed: Tensor = self.down(F.silu(self.gate(h)) * self.up(h))
        return x + fed


class Guide(nn.Module):
    """Token ids (B, T) -> logits (B, T, V); the embedding is also the output head."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        self.embedding = nn.Embedding(s.vocabulary, s.width)
        self.blocks = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = Norm(s.width, s.norm_eps)
        angles = torch.outer(
            torch.arange(s.context).float(),
            s.rope_base ** (-torch.arange(0, s.head_dim, 2).float() / s.head_dim),
        )
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._start()

    def _start(self) -> None:
        """Initialize with small normal weights; matrices that write into the residual stream start
        smaller, by depth.
        """
        for name, p in self.named_parameters():
            if p.ndim == 2:
                deep = name.endswith(("o.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * self.shape.layers) ** 0.5 if deep else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, ids: Tensor) -> Tensor:
        T = ids.shape[1]
        x = self.embedding(ids)
        cos, sin = self.cos[:T], self.sin[:T]
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.linear(self.norm(x), self.embedding.weight)


# our names -> those of the GGUF architecture "qwen2"
GGUF_NAMES = {
    "embedding.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    **{
        f"blocks.{{i}}.{ours}": f"blk.{{i}}.{theirs}"
        for ours, theirs in {
            "attn_norm.weight": "attn_norm.weight",
            "q.weight": "attn_q.weight",
            "q.bias": "attn_q.bias",
            "k.weight": "attn_k.weight",
            "k.bias": "attn_k.bias",
            "v.weight": "attn_v.weight",
            "v.bias": "attn_v.bias",
            "o.weight": "attn_output.weight",
            "ffn_norm.weight": "ffn_norm.weight",
            "gate.weight": "ffn_gate.weight",
            "up.weight": "ffn_up.weight",
            "down.weight": "ffn_down.weight",
        }.items()
    },
}


def gguf_name(name: str) -> str:
    """The GGUF name of one of our parameters."""
    parts = name.split(".")
    if parts[0] == "blocks":
        return GGUF_NAMES[".".join(("blocks", "{i}", *parts[2:]))].format(i=parts[1])
    return GGUF_NAMES[name]
