"""Attention over paged keys and values: the batch that the kernels read, and the reference.

Letters: S sequences, T new tokens in all, H query heads, J key/value heads (H a multiple of J), D
head dimension, P tokens per page. A query at position p attends to keys at positions 0..p of its
own sequence (with a `window`, to the last `window` of them). The cache holds fp16 or bf16 numbers,
or FP8 bytes with their exponents (kv_fp8.py). Latent keys (multi-head latent attention) have E columns
after the D ones that are the values, too: one head of D + E columns, stored once, and v is a view of k.

Two kernels share the work: decode.py for sequences with up to 16 new tokens (decode, draft
verification), prefill.py for prefill chunks. A mixed batch is one launch of each over its own
sequences.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from localchat_cuda.kernels.attention import kv_fp8
from localchat_cuda.kernels.launch import require
from localchat_cuda.kernels.rope import require_pages

HEAD_DIMENSIONS = (64, 96, 128, 256, 512)
LATENT_DIMENSIONS = (128, 256, 512)
LATENT_TAILS = (16, 32, 64)
"""Sizes D and E."""


class AttentionBatch(NamedTuple):
    """Sequences of one launch; all int32 on the device."""

    starts: torch.Tensor
    """[S]: first new token of the sequence in q and out."""
    counts: torch.Tensor
    """[S]: new tokens of the sequence."""
    lengths: torch.Tensor
    """[S]: tokens of the sequence in the cache, new ones included."""
    slots: torch.Tensor
    """[S]: row of the sequence in `tables`."""
    tables: torch.Tensor
    """[slots, width]: pages of each slot's sequence."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Variations of a model's attention."""

    scale: float = 0.0
    """Factor of the logits; 0.0 stands for 1/sqrt(D)."""
    window: int = 0
    """Keys visible to a query; 0: all of them."""
    soft_cap: float = 0.0
    """Logits become cap * tanh(logit / cap); 0.0: no cap."""
    sinks: torch.Tensor | None = None
    """Logit per head [H] for a key without a value, as in gpt-oss. None without sinks."""

    def scale_for(self, d: int) -> float:
        return self.scale or d**-0.5


class AttentionShape(NamedTuple):
    """Constants of the attention kernels. For the letters see the module docstring."""

    H: int
    J: int
    D: int
    P: int
    TILE: int
    """Keys of a step."""
    STAGES: int
    WINDOW: int
    SOFT_CAP: float
    """Rules.soft_cap."""
    CODED: int
    """Decoder of FP8 pages (kv_fp8.decoder_of), or 0."""
    E: int


def tail_of(k: torch.Tensor, v: torch.Tensor) -> int:
    """E: columns of keys that are no values; 0: keys are no latents."""
    return k.shape[-1] - v.shape[-1]


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: AttentionBatch,
    exponents: torch.Tensor | None = None,
) -> None:
    """Raise ValueError with the name of an argument that the kernels cannot read."""
    t, h, d = q.shape
    device = q.device
    require("q", q, (t, h, d), device)
    tail = tail_of(k, v)
    if not tail and d not in HEAD_DIMENSIONS:
        raise ValueError(f"q: head dimension {d} is none of {HEAD_DIMENSIONS}")
    require_pages("k", k, d, device, exponents)
    if tail:
        _check_latents(k, v, tail, exponents)
    else:
        require_pages("v", v, d, device, exponents)
    if k.shape[:3] != v.shape[:3] or k.stride() != v.stride() or h % k.shape[1]:
        raise ValueError(
            f"k, v: equal shapes dividing {h} heads wanted, {k.shape}, {v.shape} given"
        )
    require_batch(batch, device)
    require("tables", batch.tables, (None, None), device, torch.int32)


def require_batch(batch: AttentionBatch, device: torch.device) -> int:
    """Raise ValueError unless the arrays of a batch are as long; returns S."""
    s = batch.starts.shape[0]
    for name in ("starts", "counts", "lengths", "slots"):
        require(name, getattr(batch, name), (s,), device, torch.int32)
    return s


def _check_latents(
    k: torch.Tensor, v: torch.Tensor, tail: int, exponents: torch.Tensor | None
) -> None:
    """Raise ValueError unless v is the first columns of one head's latent keys."""
    if v.shape[-1] not in LATENT_DIMENSIONS or tail not in LATENT_TAILS:
        raise ValueError(
            f"v: {LATENT_DIMENSIONS} of the columns of k wanted, and {LATENT_TAILS} more in k; "
            f"{v.shape[-1]} of {k.shape[-1]} given"
        )
    if exponents is not None or k.shape[1] != 1 or v.data_ptr() != k.data_ptr():
        raise ValueError("v: a view of k, of numbers of one head, wanted")


def check_sinks(sinks: torch.Tensor | None, h: int, device: torch.device) -> None:
    """Raise ValueError unless the kernels can read sinks for this number of heads."""
    if sinks is not None:
        require("sinks", sinks, (h,), device)


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: AttentionBatch,
    rules: Rules,
    exponents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention [T, H, D] in fp32 with plain torch. Rows without a sequence are zero.

    With `exponents` k and v are FP8 bytes (kv_fp8.py).
    """
    t, h, d = q.shape
    j = k.shape[1]
    page = k.shape[2]
    width = d - tail_of(k, v)
    out = torch.zeros(t, h, width, device=q.device)
    for i in range(batch.starts.shape[0]):
        start, count, length = (int(x[i]) for x in (batch.starts, batch.counts, batch.lengths))
        begin = 0
        if rules.window:
            # Entries before the windows of all queries may name any page.
            begin = max(0, length - count + 1 - rules.window) // page
        pages = batch.tables[int(batch.slots[i]), begin : -(-length // page)].long()
        if exponents is None:
            keys = k[pages].float()
            values = v[pages].float()
        else:
            keys = kv_fp8.decode_reference(k[pages], exponents[pages, ..., 0])
            values = kv_fp8.decode_reference(v[pages], exponents[pages, ..., 1])
        keys = keys.transpose(1, 2).reshape(-1, j, d)[: length - begin * page]
        values = values.transpose(1, 2).reshape(-1, j, width)[: length - begin * page]
        rows = q[start : start + count].float().view(count, j, h // j, d)
        logits = torch.einsum("tjrd,njd->tjrn", rows, keys) * rules.scale_for(d)
        if rules.soft_cap:
            logits = rules.soft_cap * torch.tanh(logits / rules.soft_cap)
        positions = torch.arange(length - count, length, device=q.device)[:, None]
        key = torch.arange(begin * page, length, device=q.device)[None, :]
        hidden = key > positions
        if rules.window:
            hidden = hidden | (key <= positions - rules.window)
        logits = logits.masked_fill(hidden[:, None, None, :], -torch.inf)
        if rules.sinks is not None:
            sinks = rules.sinks.float().view(1, j, h // j, 1).expand(count, -1, -1, -1)
            weights = torch.cat((logits, sinks), -1).softmax(-1)[..., :-1]
        else:
            weights = logits.softmax(-1)
        mixed = torch.einsum("tjrn,njd->tjrd", weights, values)
        out[start : start + count] = mixed.reshape(count, h, width)
    return out
