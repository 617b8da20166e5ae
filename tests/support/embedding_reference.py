"""Reference forward passes of BERT and Qwen3 in numpy, float64, for tiny models. (T, D): tokens of one
text, width."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from numpy.typing import NDArray

from tests.support.llamacpp_models import EMBED, HEAD, HEADS, KV_HEADS, LAYERS

Array = NDArray[np.float64]


def weights_of(path: Path) -> dict[str, Array]:
    """Every tensor by name, rows first."""
    tensors: Any = GGUFReader(path).tensors
    return {one.name: np.array(one.data, np.float64).reshape(one.shape[::-1]) for one in tensors}


def bert(w: dict[str, Array], tokens: list[int]) -> Array:
    """Hidden states (T, D) of an encoder of one layer."""
    x = w["token_embd.weight"][tokens] + w["token_types.weight"][0]
    x = _layer_norm(x + w["position_embd.weight"][: len(tokens)], w, "token_embd_norm")
    heads = [_linear(x, w, f"blk.0.attn_{name}").reshape(-1, HEADS, HEAD) for name in "qkv"]
    mixed = _attention(*heads, causal=False)
    x = _layer_norm(x + _linear(mixed, w, "blk.0.attn_output"), w, "blk.0.attn_output_norm")
    inner = _linear(_gelu(_linear(x, w, "blk.0.ffn_up")), w, "blk.0.ffn_down")
    return _layer_norm(x + inner, w, "blk.0.layer_output_norm")


def qwen3(w: dict[str, Array], tokens: list[int]) -> Array:
    """Hidden states (T, D) behind the last norm."""
    x = w["token_embd.weight"][tokens]
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        normed = _rms(x) * w[block + "attn_norm.weight"]
        q = (normed @ w[block + "attn_q.weight"].T).reshape(-1, HEADS, HEAD)
        k = (normed @ w[block + "attn_k.weight"].T).reshape(-1, KV_HEADS, HEAD)
        v = (normed @ w[block + "attn_v.weight"].T).reshape(-1, KV_HEADS, HEAD)
        q = _turned(_rms(q) * w[block + "attn_q_norm.weight"])
        k = _turned(_rms(k) * w[block + "attn_k_norm.weight"])
        k, v = (np.repeat(each, HEADS // KV_HEADS, axis=1) for each in (k, v))
        x = x + _attention(q, k, v, causal=True) @ w[block + "attn_output.weight"].T
        normed = _rms(x) * w[block + "ffn_norm.weight"]
        gate = normed @ w[block + "ffn_gate.weight"].T
        inner = gate / (1 + np.exp(-gate)) * (normed @ w[block + "ffn_up.weight"].T)
        x = x + inner @ w[block + "ffn_down.weight"].T
    return _rms(x) * w["output_norm.weight"]


def rank_score(w: dict[str, Array], hidden: Array) -> float:
    """The score of a pair, by the head on the hidden state of its first token."""
    inner = np.tanh(w["cls.weight"] @ hidden[0] + w["cls.bias"])
    return float((w["cls.output.weight"] @ inner + w["cls.output.bias"])[0])


def pooled(hidden: Array, pooling: str) -> Array:
    """One vector of length 1."""
    vector = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling]
    result: Array = vector / np.linalg.norm(vector)
    return result


def _attention(q: Array, k: Array, v: Array, *, causal: bool) -> Array:
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD)
    if causal:
        scores += np.triu(np.full(scores.shape[1:], -np.inf), 1)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    mixed: Array = np.einsum("hqk,khd->qhd", shares, v).reshape(len(q), -1)
    return mixed


def _turned(x: Array) -> Array:
    """Rotary positions, halves apart (NEOX)."""
    half = HEAD // 2
    angles = np.arange(len(x))[:, None] * 10_000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    left, right = x[..., :half], x[..., half:]
    return np.concatenate((left * cos - right * sin, right * cos + left * sin), -1)


def _linear(x: Array, w: dict[str, Array], name: str) -> Array:
    result: Array = x @ w[f"{name}.weight"].T + w[f"{name}.bias"]
    return result


def _layer_norm(x: Array, w: dict[str, Array], name: str) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    result: Array = scaled * w[f"{name}.weight"] + w[f"{name}.bias"]
    return result


def _rms(x: Array) -> Array:
    result: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    return result


def _gelu(x: Array) -> Array:
    result: Array = x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return result


assert EMBED == HEADS * HEAD
