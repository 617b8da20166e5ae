"""A GGUF file's weights without the file: random ones in the mix of Q4_K_M."""

import torch

from localchat.fit.hardware import read_machine
from localchat_cuda.config.gguf import LayerFormats
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.ggml_forms import GGUF_FORMS
from localchat_cuda.weights.gguf_source import GgufWeights
from localchat_cuda.weights.layer_shapes import linear_shapes
from localchat_cuda.weights.source import RandomWeights
from scripts.bench.cuda.driving import GPU, Engine, config_of, runner_of
from scripts.bench.cuda.speed import MetricsSnapshot, decode_rate, first_token_ms

STREAMS = (1, 2, 4, 8, 16, 32, 64, 128)
_SCALES = {
    "Q4_K": ((0, 1 / 258), (2, 7.5 / 258)),
    "Q6_K": ((208, 1 / 1367),),
    "Q8_0": ((0, 1 / 73.9),),
}
"""Bytes of the fp16 numbers of a block, and their values for weights of deviation 1."""
_WIDER = ("v_proj", "down_proj")


def _format(name: str, mix: str) -> str:
    """As llama.cpp's quantizer chooses for Q4_K_M: half of the layers have v and down in Q6_K."""
    if mix != "Q4_K_M":
        return mix
    if name.startswith("lm_head"):
        return "Q6_K"
    even = int(name.split(".layers.")[1].split(".")[0]) % 2 == 0
    return "Q6_K" if even and any(each in name for each in _WIDER) else "Q4_K"


class RandomGguf(GgufWeights):
    """See GgufWeights."""

    def __init__(self, device: torch.device, mix: str = "Q4_K_M") -> None:
        self.device, self._floating, self._mix = device, RandomWeights(device), mix

    def has(self, name: str) -> bool:
        return name.endswith(".weight")

    def shape(self, name: str) -> tuple[int, ...]:
        return ()

    def in_blocks(self, name: str) -> bool:
        return "_proj" in name

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._floating.tensor(name, shape, dtype)

    def blocks(self, name: str, shape: tuple[int, ...]) -> tuple[str, torch.Tensor]:
        type_, (n, k) = _format(name, self._mix), shape
        form = GGUF_FORMS[type_]
        size = (n * k // form.block, form.block_bytes)
        raw = torch.randint(0, 256, size, dtype=torch.uint8, device=self.device)
        for at, value in _SCALES[type_]:
            number = torch.tensor([0.02 * value], dtype=torch.float16).view(torch.uint8)
            raw[:, at : at + 2] = number.to(self.device)
        return type_, raw.view(n, -1)

    def unread(self) -> list[str]:
        return []


def formats(mix: str = "Q4_K_M") -> LayerFormats:
    """Of the two kinds of layers."""
    names = (*("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
             *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))  # fmt: skip
    return tuple(
        tuple((each, _format(f"model.layers.{layer}.{each}", mix)) for each in names)
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


def gguf_types(results: MetricsSnapshot) -> None:
    """q8_0_bs1, q6_k_bs1: models of one type, and the bytes that they read in a second as shares of the peak of
    the memory, which q4_k_m_of_peak is beside."""
    gpu = read_machine().gpus[0]
    for name, mix in (("q4_k_m", "Q4_K_M"), ("q6_k", "Q6_K"), ("q8_0", "Q8_0")):
        config = config_of(name)
        runner = runner_of(
            config, slots=8, kv_tokens=8 * 512 + 8192, unpacked=False, source=RandomGguf(GPU, mix),
            formats=formats(mix),
        )  # fmt: skip
        engine = Engine(runner, config.vocabulary)
        results[f"{name}_bs1"] = rate = decode_rate(engine, 1)
        read = _read_bytes(config, mix)
        results[f"{name}_of_peak"] = share = rate * read / gpu.bytes_per_s
        print(
            f"{name}: {rate:.0f} tok/s of {read / 1e9:.2f} GB, {share:.3f} of the peak", flush=True
        )
        runner.close()
        del engine, runner
        torch.cuda.empty_cache()


def _read_bytes(config: ModelConfig, mix: str) -> float:
    """Of blocks, for one token: all layers and the head."""
    layers = ((f"model.layers.{number}.", number) for number in range(config.layers))
    names = [("lm_head", config.vocabulary * config.hidden)]
    merged = config.family.names.merged
    for begin, number in layers:
        for field, (parts, k) in linear_shapes(config, number).items():
            names += [(begin + name, n * k) for name, n in zip(merged[field], parts, strict=True)]
    forms = ((GGUF_FORMS[_format(name, mix)], count) for name, count in names)
    return sum(form.block_bytes * count / form.block for form, count in forms)
