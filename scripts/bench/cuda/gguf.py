"""A GGUF file's weights without the file: random ones in the mix of Q4_K_M."""

import torch

from localchat_cuda.ggml_forms import GGUF_FORMS
from localchat_cuda.gguf_config import LayerFormats
from localchat_cuda.weights.gguf_source import GgufWeights
from localchat_cuda.weights.source import RandomWeights
from scripts.bench.cuda.driving import GPU, Engine, config_of, runner_of
from scripts.bench.cuda.speed import MetricsSnapshot, decode_rate, first_token_ms

STREAMS = (1, 2, 4, 8, 16, 32, 64, 128)
_SCALES = {"Q4_K": ((0, 1 / 258), (2, 7.5 / 258)), "Q6_K": ((208, 1 / 1367),)}
"""Bytes of the fp16 numbers of a block, and their values for weights of deviation 1."""
_WIDER = ("v_proj", "down_proj")


def _format(name: str) -> str:
    """As llama.cpp's quantizer chooses: half of the layers have v and down in Q6_K."""
    if name.startswith("lm_head"):
        return "Q6_K"
    even = int(name.split(".layers.")[1].split(".")[0]) % 2 == 0
    return "Q6_K" if even and any(each in name for each in _WIDER) else "Q4_K"


class RandomGguf(GgufWeights):
    """See GgufWeights."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._floating = device, RandomWeights(device)

    def has(self, name: str) -> bool:
        return name.endswith(".weight")

    def shape(self, name: str) -> tuple[int, ...]:
        return ()

    def in_blocks(self, name: str) -> bool:
        return "_proj" in name

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._floating.tensor(name, shape, dtype)

    def blocks(self, name: str, shape: tuple[int, ...]) -> tuple[str, torch.Tensor]:
        type_, (n, k) = _format(name), shape
        size = GGUF_FORMS[type_].block_bytes
        raw = torch.randint(0, 256, (n * k // 256, size), dtype=torch.uint8, device=self.device)
        for at, value in _SCALES[type_]:
            number = torch.tensor([0.02 * value], dtype=torch.float16).view(torch.uint8)
            raw[:, at : at + 2] = number.to(self.device)
        return type_, raw.view(n, -1)

    def unread(self) -> list[str]:
        return []


def formats() -> LayerFormats:
    """Of the two kinds of layers."""
    names = (*("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
             *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))  # fmt: skip
    return tuple(
        tuple((each, _format(f"model.layers.{layer}.{each}")) for each in names)
        for layer in range(2)
    )


def gguf(results: MetricsSnapshot) -> None:
    """gguf_bs*, gguf_ttft_ms_*: with an unpacked copy of the weights and without."""
    config = config_of("q4_k_m")
    for unpacked, streams in ((True, STREAMS), (False, (32, 128))):
        runner = runner_of(
            config, slots=128, kv_tokens=128 * 512 + 8192, unpacked=unpacked, source=RandomGguf(GPU),
            formats=formats(),
        )  # fmt: skip
        engine, kind = Engine(runner, config.vocabulary), "" if unpacked else "_packed"
        for size in streams:
            results[f"gguf{kind}_bs{size}"] = rate = decode_rate(engine, size)
            print(f"gguf{kind} {size} streams: {rate:.0f} tok/s", flush=True)
        for size in (128, 2048):
            results[f"gguf{kind}_ttft_ms_{size}"] = ms = first_token_ms(engine, size)
            print(f"gguf{kind} first token of {size}: {ms:.1f} ms", flush=True)
        runner.close()
        del engine, runner
        torch.cuda.empty_cache()
