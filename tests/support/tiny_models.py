"""Tiny random checkpoints of every architecture, made with transformers, and a way to run ours on them."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
import transformers

from localchat.backend_api.interface import Capabilities
from localchat.fit.load_options import RoundedType
from localchat_cuda.architectures import ARCHITECTURES
from localchat_cuda.config.model import ModelConfig, rounded_config
from localchat_cuda.config.reader import read_config
from localchat_cuda.kernels.attention.prefill import PrefillTileConfig
from localchat_cuda.kernels.int4 import e2m1
from localchat_cuda.kernels.launch import interpreted
from localchat_cuda.layers.dense import DenseLayers
from localchat_cuda.layers.packed import PackedLayers
from localchat_cuda.ranks.collective import Collective
from localchat_cuda.ranks.rank_weights import RankWeights
from localchat_cuda.ranks.split import split_config
from localchat_cuda.runner.device_state import StateTable
from localchat_cuda.runner.input_batch import (
    BatchConfig,
    build_input_batch,
    model_inputs,
    write_batch,
)
from localchat_cuda.runner.input_batch import TokenSpan as Placed
from localchat_cuda.runner.kv_pages import Pages
from localchat_cuda.runner.model import DeviceModel
from localchat_cuda.runner.step_buffer import StepBuffer
from localchat_cuda.weights.loader import load
from localchat_cuda.weights.model_weights import ModelWeights
from localchat_cuda.weights.source import CheckpointWeights, WeightSource
from tests.support import int4_reference
from tests.support.awq import to_awq
from tests.support.seeded import seeded

CPU = torch.device("cpu")
VOCABULARY = 160
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "rope_theta": 10000.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + i / 50 for i in range(24)],
    "long_factor": [1.0 + i / 4 for i in range(24)],
}
TWO_ROTATIONS = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
ENDS = {"pad_token_id": 0, "eos_token_id": 2}
NARROW = {"num_attention_heads": 2, "num_key_value_heads": 1}
GEMMA = {
    **NARROW,
    "tie_word_embeddings": True,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"],
    "head_dim": 256,
    "query_pre_attn_scalar": 100,
    "hidden_activation": "gelu_pytorch_tanh",
}
GEMMA4 = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"],
    "head_dim": 64,
    "global_head_dim": 128,
    "num_global_key_value_heads": 1,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 5.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e6,
        },
    },
}
MIXTURE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 128}
SHARPENED = {"mscale": 0.707, "mscale_all_dim": 0.9}
LATENT = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 128,
    "q_lora_rank": None,
    "qk_rope_head_dim": 32,
    "head_dim": 32,
    "qk_nope_head_dim": 48,
    "v_head_dim": 64,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 128,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.05,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
    "rms_norm_eps": 0.1,
}
GRANITE_MIXTURE = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 128}
DELTA_NET_FLOATS = tuple(
    f"{name}.weight" for name in ("conv1d", "conv.conv", "in_proj_ba", "in_proj_a", "in_proj_b")
)
"""Parts of delta nets that no checkpoint quantizes."""
ROUTERS = ("mlp.gate.weight", "expert_gate.weight", "router.weight")
HYBRID = {
    "initializer_range": 0.15,
    **NARROW,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "rope_parameters": {
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
}
MAMBA = {
    "initializer_range": 0.15,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 16,
    "mamba_expand": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_d_head": 32,
}
SHORT_CONV = {
    **NARROW,
    **ENDS,
    "initializer_range": 0.15,
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "intermediate_size": 384,
    "block_multiple_of": 64,
    "norm_eps": 1e-3,
    "tie_word_embeddings": True,
}
NEMOTRON = {
    **NARROW,
    "initializer_range": 0.15,
    "layers_block_type": [
        *("linear_attention", "mlp", "linear_attention"),
        *("full_attention", "mlp", "linear_attention", "mlp"),
    ],
    "mamba_num_heads": 16,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 32,
    "layer_norm_epsilon": 1e-3,
    # transformers raises the time steps of prompts to this minimum, but not those of single tokens.
    "time_step_min": 1e-12,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False, "rope_parameters": LLAMA3}),
    "qwen2": (
        "Qwen2",
        {"tie_word_embeddings": True, "num_attention_heads": 2, "num_key_value_heads": 1},
    ),
    "qwen3": ("Qwen3", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    "qwen3-yarn": ("Qwen3", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1, **NARROW},
    ),
    "mistral": ("Mistral", {"sliding_window": 24, **NARROW}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 8.0, "final_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3", {**GEMMA, "rope_parameters": TWO_ROTATIONS}),
    "gemma4": (
        "Gemma4Unified",
        {
            **GEMMA4,
            "head_dim": 256,
            "global_head_dim": 512,
            "attention_k_eq_v": True,
        },
    ),
    "gemma4-small": (
        "Gemma4",
        {
            **GEMMA4,
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 128,
            "vocab_size_per_layer_input": VOCABULARY,
        },
    ),
    "gemma4-moe": (
        "Gemma4",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 64,
        },
    ),
    "phi3": ("Phi3", {**NARROW, **ENDS, "rope_parameters": {"rope_theta": 10000.0}}),
    "phi3-long": (
        "Phi3",
        {
            **NARROW,
            **ENDS,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 16,
            "rope_parameters": LONG,
        },
    ),
    "mixtral": (
        "Mixtral",
        {**NARROW, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 128},
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        {**NARROW, **MIXTURE, "shared_expert_intermediate_size": 256},
    ),
    "qwen3-moe": ("Qwen3Moe", {**MIXTURE, "norm_topk_prob": True}),
    "ministral": (
        "Ministral",
        {**NARROW, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "seed-oss": ("SeedOss", NARROW),
    "glm4": (
        "Glm4",
        {
            **NARROW,
            **ENDS,
            "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "rms_norm_eps": 1e-5,
        },
    ),
    "deepseek-v2": ("DeepseekV2", {**LATENT, "rope_parameters": {**YARN, **SHARPENED}}),
    "deepseek-v2-q": ("DeepseekV2", {**LATENT, "q_lora_rank": 128}),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        {
            **LATENT,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "v_head_dim": 128,
            "q_lora_rank": 128,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
        },
    ),
    "granite": ("Granite", {**GRANITE, "hidden_size": 256}),
    "granite-moe": ("GraniteMoe", {**NARROW, **GRANITE, **GRANITE_MIXTURE}),
    "granite4": (
        "GraniteMoeHybrid",
        {
            **NARROW,
            **GRANITE,
            "num_local_experts": 0,
            "shared_intermediate_size": 256,
            "layer_types": ["full_attention"] * 2,
            "position_embedding_type": "rope",
        },
    ),
    "granite4-moe": (
        "GraniteMoeHybrid",
        {
            **NARROW,
            **GRANITE,
            **GRANITE_MIXTURE,
            "shared_intermediate_size": 256,
            "layer_types": ["full_attention"] * 2,
        },
    ),
    "lfm2": ("Lfm2", SHORT_CONV),
    "granite4-h": (
        "GraniteMoeHybrid",
        {**NARROW, **GRANITE, **MAMBA, "num_local_experts": 0, "shared_intermediate_size": 256},
    ),
    "granite4-h-moe": (
        "GraniteMoeHybrid",
        {
            **NARROW,
            **GRANITE,
            **MAMBA,
            **GRANITE_MIXTURE,
            "shared_intermediate_size": 256,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        },
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        {
            **SHORT_CONV,
            **MIXTURE,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    "nemotron-h": ("NemotronH", NEMOTRON),
    "nemotron-h-moe": (
        "NemotronH",
        {
            **NEMOTRON,
            "layers_block_type": [
                *("linear_attention", "moe", "full_attention"),
                *("moe", "mlp", "linear_attention", "moe"),
            ],
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 128,
            "moe_shared_expert_intermediate_size": 256,
            "routed_scaling_factor": 2.5,
        },
    ),
    "olmo2": ("Olmo2", {**NARROW, **ENDS, "rms_norm_eps": 1e-5}),
    "olmo3": (
        "Olmo3",
        {
            **NARROW,
            **ENDS,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "smollm3": ("SmolLM3", {**NARROW, **ENDS, "num_hidden_layers": 3, "no_rope_layer_interval": 2}),
    "gpt-oss": (
        "GptOss",
        {
            "hidden_size": 192,
            "intermediate_size": 160,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 24,
            "swiglu_limit": 2.0,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "qwen3-next": (
        "Qwen3Next",
        {
            **HYBRID,
            **MIXTURE,
            "shared_expert_intermediate_size": 256,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        },
    ),
    "qwen3.5": ("Qwen3_5", HYBRID),
    "qwen3.5-moe": (
        "Qwen3_5Moe",
        {**HYBRID, **MIXTURE, "shared_expert_intermediate_size": 128},
    ),
}


def reference(kind: str, **changed: Any) -> Any:
    """The model in transformers, fp32, every bias and norm away from its dull beginning."""
    family, changes = KINDS[kind]
    with_text = "Gemma3", "Gemma4", "Gemma4Unified", "Qwen3_5", "Qwen3_5Moe"
    text = f"{family}Text" if family in with_text else family
    shape = {**SHAPE, **changes, **changed}
    if "rope_parameters" in shape:
        del shape["rope_theta"]
    config = getattr(transformers, f"{text}Config")(**shape, attn_implementation="eager")
    torch.manual_seed(len(kind))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.generation_config.eos_token_id = None  # else no token that ends a text is ever drawn
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("_bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            if name.endswith("modality_router.weight"):  # which reads rows divided by their columns
                parameter.mul_(parameter.shape[1])
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.mul_(0.5 + torch.rand(1))
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.add_(torch.randn_like(buffer) * 0.3)
    return model


def reference_logits(model: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    """Compute the logits [T, vocabulary] of transformers' model."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the length of the difference over that of `wanted`."""
    return float((found - wanted).norm() / wanted.norm())


def save(model: Any, folder: Path, shards: str = "100KB") -> None:
    """As the hub has it, in several files."""
    model.save_pretrained(folder, max_shard_size=shards)


def save_awq(model: Any, folder: Path, floating: str = "-") -> None:
    """Layers as AutoAWQ writes them, but for those that have `floating` in their names; the model's own
    weights become what the codes stand for."""
    generator = seeded(3)

    def layer(prefix: str, weight: torch.Tensor) -> Layer:
        n, k = weight.shape
        codes = torch.randint(0, 16, (n, k), generator=generator)
        zeros = torch.randint(6, 10, (n, k // 128), generator=generator)
        scales = ((torch.rand(n, k // 128, generator=generator) + 0.5) * 0.05).half()
        wide = (scales.float().repeat_interleave(128, 1), zeros.repeat_interleave(128, 1))
        names = ("qweight", "qzeros", "scales")
        parts = zip(names, to_awq(codes, scales, zeros), strict=True)
        return Layer(dict(parts), (codes - wide[1]) * wide[0])

    save_layers(model, folder, layer, AWQ, floating)


def save_mxfp4(model: Any, folder: Path) -> None:
    """gpt-oss as it is published, experts in MXFP4; the model's own become what is stored."""
    generator = seeded(4)
    tensors: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            if not name.endswith(("gate_up_proj", "down_proj")):
                tensors[name] = parameter.clone()
                continue
            count, k, n = parameter.shape
            codes = torch.randint(0, 16, (count, n, k), generator=generator)
            scales = torch.randint(123, 126, (count, n, k // 32), generator=generator)
            values = torch.tensor([*e2m1.VALUES, *(-each for each in e2m1.VALUES)])[codes]
            wide = torch.exp2(scales.float() - 127).repeat_interleave(32, 2)
            parameter.copy_((values * wide).transpose(1, 2))
            packed = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
            tensors[f"{name}_blocks"] = packed.view(count, n, k // 32, 16)
            tensors[f"{name}_scales"] = scales.to(torch.uint8)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    held = {**model.config.to_dict(), "quantization_config": {"quant_method": "mxfp4"}}
    held["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(held, default=str))


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}


class Layer(NamedTuple):
    """A quantized layer: its tensors by the ends of their names, and the weight that they stand for."""

    tensors: dict[str, torch.Tensor]
    weight: torch.Tensor


def save_layers(
    model: Any, folder: Path, layer: Callable[[str, torch.Tensor], Layer],
    quantization: dict[str, Any], floating: str = "-",
) -> None:  # fmt: skip
    """Layers as `layer` makes them of a name and a weight, but for those that have `floating` in their
    names; the model's own weights become what is stored."""
    tensors: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            if parameter.dim() == 3 and "experts" in name:
                for prefix, weight in _expert_layers(model, name, parameter):
                    whole = Layer({"weight": weight.clone().half()}, weight.half())
                    found = whole if floating in name else layer(prefix, weight)
                    weight.copy_(found.weight)
                    tensors |= {f"{prefix}.{part}": each for part, each in found.tensors.items()}
                continue
            plain = name.endswith((*ROUTERS, *DELTA_NET_FLOATS))
            kept = not name.startswith("model.layers.") or parameter.dim() == 1 or plain
            if kept or floating in name:
                stored = _stored_name(model, name)
                if name != "lm_head.weight" or not model.config.tie_word_embeddings:
                    tensors[stored] = parameter.clone().half()
                    parameter.copy_(tensors[stored])
                continue
            prefix = name.removesuffix(".weight")
            found = layer(prefix, parameter)
            parameter.copy_(found.weight)
            tensors |= {f"{prefix}.{part}": each for part, each in found.tensors.items()}
    safetensors.torch.save_file(
        {name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors"
    )
    held = {**model.config.to_dict(), "quantization_config": quantization}
    held["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(held, default=str))


def _stored_name(model: Any, name: str) -> str:
    """Checkpoint name of a parameter outside the experts."""
    if type(model).__name__ == "MixtralForCausalLM":
        return name.replace(".mlp.", ".block_sparse_moe.")
    return name.replace(".router.weight", ".router.layer.weight")


def _expert_layers(
    model: Any, name: str, stacked: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Checkpoint names of the layers in a stacked parameter of experts, and views of them."""
    prefix, field = _stored_name(model, name).rsplit(".", 1)
    mixtral = type(model).__name__ == "MixtralForCausalLM"
    own = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for number, expert in enumerate(stacked):
        parts = zip(own, expert.chunk(2), strict=False) if "gate" in field else ((own[2], expert),)
        for part, weight in parts:
            yield f"{prefix}.{number}.{part}", weight


def spoil(pages: Pages) -> None:
    """Fill pages with what spoils whatever reads them before they are written."""
    for pool in pages.pools:
        pool.fill_(0x7F7F if pages.exponents else float("nan"))
    for exponents in pages.exponents:
        exponents.fill_(255)
    if pages.states is not None:
        pages.states.matrices.fill_(float("nan"))
        pages.states.inputs.fill_(float("nan"))


class Stretch(NamedTuple):
    """Tokens of one sequence in a step, and how many of the last are wanted."""

    slot: int
    start: int
    tokens: tuple[int, ...]
    wanted: int = 1


class Tiny:
    """Our model over a checkpoint, with pages handed out in a shuffled order."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, *, kernels: bool = False, fp8_kv: bool = False,
        prefill_tile: PrefillTileConfig | None = None, collective: Collective | None = None,
        rounded: RoundedType | None = None,
    ) -> None:  # fmt: skip
        """`collective`: the model is one rank of several. `rounded`: type to round the layers to."""
        if kernels and not interpreted():
            pytest.skip("tensors of a CPU need kernels in the interpreter")
        whole = rounded_config(read_config(folder), rounded, folder.name)
        self.config: ModelConfig = whole
        source: WeightSource = CheckpointWeights(folder, CPU)
        if collective is not None:
            self.config = split_config(whole, collective.ranks, folder.name)
            source = RankWeights(
                CheckpointWeights(folder, CPU), whole, self.config, collective.rank
            )
        self.weights: ModelWeights = load(self.config, source, CPU, dtype=dtype)
        self.kernels = kernels
        heads, d = self.config.heads, self.config.head_dim_of(self.config.layers - 1)
        self.batch_config = BatchConfig(
            heads, self.config.key_heads, d, 64, 4, fp8_kv=fp8_kv, prefill_tile=prefill_tile,
            states=self.config.recurrent is not None,
        )  # fmt: skip
        can = Capabilities(
            256, 12 * 64, 3, 3, 256, block_tokens=64, kv_type="fp8" if fp8_kv else "f16"
        )
        self.pages = Pages(self.config, can, CPU, dtype)
        spoil(self.pages)
        self.table = StateTable(can, CPU)
        self.collective = collective
        order = torch.randperm(12, generator=seeded(2)).int()
        self.table.block_tables[:3] = order.view(3, 4)

    def step(self, *stretches: Stretch, packed: bool = False) -> torch.Tensor:
        """Logits of the wanted tokens, in the order of the stretches."""
        placed = [Placed(s.slot, s.start, len(s.tokens)) for s in stretches]
        batch = build_input_batch(placed, self.batch_config, 3)
        buffer = StepBuffer(8192, 1, CPU)
        buffer.begin_step()
        self.table.token_table.zero_()
        for slot, start, tokens, _ in stretches:
            self.table.tokens_by_slot[slot, start : start + len(tokens)] = torch.tensor(tokens)
        slices = write_batch(batch, buffer, self.table)
        wanted = [
            first + len(each.tokens) - back
            for first, each in zip(batch.first, stretches, strict=True)
            for back in range(each.wanted, 0, -1)
        ]
        inputs = model_inputs(batch, slices, self.table, torch.tensor(wanted))
        kind = PackedLayers if packed else DenseLayers
        how: Any = {"kernels": self.kernels, "collective": self.collective}
        layers = kind(self.config, inputs, self.pages, **how)
        model = DeviceModel(self.config, self.weights, self.pages, **how)
        forward = ARCHITECTURES[self.config.architecture].forward
        with nullcontext() if self.kernels else int4_reference.in_place_of_kernels():
            return model.logits(forward(layers, self.weights))

    def prompt(self, tokens: Sequence[int], chunk: int, slot: int = 0, **how: bool) -> torch.Tensor:
        """Logits of every token, computed in chunks."""
        pieces = [tokens[at : at + chunk] for at in range(0, len(tokens), chunk)]
        found = [
            self.step(Stretch(slot, at * chunk, tuple(piece), len(piece)), **how)
            for at, piece in enumerate(pieces)
        ]
        return torch.cat(found)


@lru_cache
def tokens_of(seed: int, count: int) -> tuple[int, ...]:
    generator = seeded(seed)
    return tuple(torch.randint(0, VOCABULARY, (count,), generator=generator).tolist())
