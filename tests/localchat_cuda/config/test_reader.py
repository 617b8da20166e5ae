import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from localchat.errors import ModelInvalid, ModelMissing, UsageError
from localchat.fit.load_options import RoundedType
from localchat_cuda.architectures import families
from localchat_cuda.config.mixture import Mixture
from localchat_cuda.config.model import ModelConfig, rounded_config
from localchat_cuda.config.quantization import Quantization
from localchat_cuda.config.reader import parse_config, read_config
from localchat_cuda.config.rope import Llama3Scaling, ProportionalScaling, Rotation, YarnScaling
from localchat_cuda.plan.memory_plan import kv_token_bytes
from tests.support.cuda_configs import AWQ, GPTQ, QWEN25
from tests.support.hub_configs import CONFIGS
from tests.support.paths import ROOT

ROUND = {**GPTQ, "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def is_packed(config: ModelConfig) -> bool:
    return config.quantization is not None and config.quantization.packed


def scheme(**changed: Any) -> dict[str, Any]:
    """As llm-compressor writes it."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 128,
        "symmetric": True,
    }
    group = {"targets": ["Linear"], "weights": weights | changed, "input_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }  # fmt: skip


def test_qwen25_is_read() -> None:
    found = parse_config(QWEN25, "it")
    assert (found.architecture, found.layers, found.head_dim) == ("qwen2", 28, 128)
    assert found.qkv_columns == 36 * 128
    assert found.qkv_bias and "q_norm" not in found.family.names.norms
    assert found.quantization is None and not is_packed(found)
    assert found.rotation == Rotation(1e6)
    assert not any(found.windows)


@pytest.mark.parametrize(
    "how",
    [
        {"rope_theta": 5e5, "rope_scaling": SCALING},
        {"rope_theta": None, "rope_parameters": {**SCALING, "rope_theta": 5e5}},
    ],
)
def test_scaled_rotations_are_read_in_both_spellings(how: dict[str, Any]) -> None:
    raw = {**QWEN25, "architectures": ["LlamaForCausalLM"], "eos_token_id": [1, 2], **how}
    found = parse_config({key: value for key, value in raw.items() if value is not None}, "it")
    assert found.rotation == Rotation(5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    assert not found.qkv_bias


def test_awq_and_qwen3_are_read() -> None:
    raw = {
        **QWEN25,
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 96,
        "quantization_config": AWQ,
    }
    found = parse_config(raw, "it")
    assert is_packed(found) and "q_norm" in found.family.names.norms and found.head_dim == 96


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        (GPTQ, Quantization("gptq", symmetric=True, zeros_minus_one=True)),
        (
            {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2", "dynamic": {"-:.*o_proj": {}}},
            Quantization("gptq"),
        ),
        (
            {**GPTQ, "desc_act": True, "static_groups": False, "group_size": 256},
            Quantization("gptq", group=256, symmetric=True, act_order=True, zeros_minus_one=True),
        ),
        (
            {**GPTQ, "desc_act": True, "group_size": -1},
            Quantization("gptq", group=0, symmetric=True, zeros_minus_one=True),
        ),
        (ROUND, Quantization("gptq", symmetric=True, zeros_minus_one=True)),
        ({**ROUND, "packing_format": "auto_round:auto_awq"}, Quantization("awq")),
        ({**AWQ, "version": None, "checkpoint_format": "gemm"}, Quantization("awq")),
        ({**AWQ, "group_size": 64}, Quantization("awq", group=64)),
        (
            {**GPTQ, "group_size": 32},
            Quantization("gptq", group=32, symmetric=True, zeros_minus_one=True),
        ),
        (
            {**ROUND, "group_size": 32, "packing_format": "auto_round:auto_awq"},
            Quantization("awq", group=32),
        ),
        (scheme(group_size=64), Quantization("packed", group=64, symmetric=True)),
        (scheme(), Quantization("packed", symmetric=True)),
        (scheme(num_bits=8), Quantization("packed", 8, symmetric=True)),
        (
            {**scheme(num_bits=8, strategy="channel"), "format": "int-quantized"},
            Quantization("int8", 8, 0, symmetric=True),
        ),
        (
            scheme(symmetric=False, actorder="group"),
            Quantization("packed", act_order=True),
        ),
        (scheme(actorder="weight"), Quantization("packed", symmetric=True)),
        (
            scheme(strategy="channel", group_size=None),
            Quantization("packed", group=0, symmetric=True),
        ),
    ],
)
def test_each_librarys_config_is_read(raw: dict[str, Any], wanted: Quantization) -> None:
    assert parse_config({**QWEN25, "quantization_config": raw}, "it").quantization == wanted


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": None}, "of no name"),
        ({"num_attention_heads": 27}, "not a multiple"),
        ({"head_dim": 80}, "heads of 80"),
        ({"use_bidirectional_attention": True}, "later tokens"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_act": ["silu"]}, "silu"),
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "spiral"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "as bitsandbytes\\."),
        ({"quantization_config": {"bits": 4}}, "by an unnamed method, 4 bits"),
        (
            {"quantization_config": {**AWQ, "group_size": 16}},
            "groups of 16 .supported: 32, 64 or 128",
        ),
        ({"quantization_config": {**AWQ, "version": "gemv"}}, "gemv"),
        ({"quantization_config": {**GPTQ, "bits": 3}}, "3 bits .supported: 4 and 8"),
        (
            {"quantization_config": {**GPTQ, "group_size": 16}},
            "groups of 16 .supported: multiples of 32",
        ),
        ({"quantization_config": {**GPTQ, "checkpoint_format": "marlin"}}, "marlin"),
        ({"quantization_config": {**GPTQ, "is_marlin_format": True}}, "marlin"),
        ({"quantization_config": {**GPTQ, "lm_head": True}}, "quantized head"),
        ({"quantization_config": {**GPTQ, "dynamic": {"+:.*down": {"bits": 8}}}}, "otherwise"),
        ({"quantization_config": {**ROUND, "packing_format": "auto_round:gguf"}}, "gguf"),
        ({"quantization_config": scheme(num_bits=2)}, "int of 2 bits"),
        ({"quantization_config": scheme(group_size=48)}, "groups of 48"),
        ({"quantization_config": scheme(strategy="tensor")}, "each tensor"),
        ({"quantization_config": {**scheme(), "transform_config": {"R1": {}}}}, "rotated"),
        ({"quantization_config": {**scheme(), "config_groups": {}}}, "0 kinds"),
        ({"torch_dtype": "float8"}, "float8"),
        ({"use_sliding_window": True, "layer_types": ["chunked_attention"] * 28}, "chunked"),
        ({"use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types"),
        ({"use_sliding_window": True, "max_window_layers": "all"}, "max_window_layers"),
    ],
)
def test_what_cannot_run_is_refused_with_what_can(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelInvalid, match=words) as caught:
        parse_config({**QWEN25, **change}, "it")
    if "layer" not in words:
        assert all(name in caught.value.hint for name in ("Qwen3", "Gemma 3", "Mistral", "Phi-4"))
        assert "llama.cpp" in caught.value.hint


def test_the_documents_list_the_classes_that_load() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text("utf-8")
    listed = set(re.findall(r"`(\w+For(?:CausalLM|ConditionalGeneration))`", text))
    classes = [name for family in families() for name in family.classes]
    assert listed == {*classes}
    assert len(classes) == len({*classes})


def test_gemma_3_is_read_where_its_config_is_silent() -> None:
    found = parse_config(CONFIGS["gemma3:4b"][0], "it")
    assert (found.heads, found.key_heads, found.head_dim) == (8, 4, 256)
    assert (found.vocabulary, found.context_train) == (262208, 131072)
    assert (found.rotation, found.windowed_rotation) == (
        Rotation(1e6, ProportionalScaling(1.0, 8.0)),
        Rotation(1e4),
    )
    assert found.windows[:7] == (1024, 1024, 1024, 1024, 1024, 0, 1024)
    assert (found.attention_scale, found.embedding_scale) == (1 / 16, 2560**0.5)
    assert (
        found.tied
        and found.vision
        and "q_norm" in found.family.names.norms
        and found.family.post_normed
    )
    assert found.activation == "gelu_tanh"


def test_hybrids_are_read_with_their_delta_nets() -> None:
    found = parse_config(CONFIGS["qwen3.5:9b"][0], "it")
    net = found.recurrent
    assert net is not None
    assert (net.count, len(found.kv_layers), net.layers[2:5]) == (
        24,
        8,
        (True, False, True),
    )
    assert (net.key_heads, net.value_heads, net.channels, net.columns) == (16, 32, 8192, 12288)
    assert found.rotation == Rotation(1e7, columns=64)
    assert found.state_bytes == 24 * (4 * 32 * 128 * 128 + 2 * 3 * 8192)
    assert found.qkv_columns == (2 * 16 + 2 * 4) * 256 and found.vision
    mixed = parse_config(CONFIGS["qwen3.6:35b-a3b"][0], "it")
    assert mixed.mixture == Mixture(256, 8, normalized=True, shared=1, gated=True)
    assert mixed.recurrent is not None and mixed.recurrent.count == 30


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": ["linear_attention"] * 32}, "attention in none"),
        ({"layer_types": ["mamba"] * 32}, "layers of kind mamba"),
        ({"layer_types": ["full_attention"]}, "not a list of 32 kinds"),
        ({"linear_conv_kernel_dim": 3}, "convolutions over 3 tokens"),
        ({"linear_num_value_heads": 24}, "not a multiple"),
        ({"linear_key_head_dim": 192}, "192 columns"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}, "delta nets quantized"),
    ],
)
def test_other_delta_nets_are_refused(change: dict[str, Any], words: str) -> None:
    raw = CONFIGS["qwen3.5:9b"][0]
    with pytest.raises(ModelInvalid, match=words):
        parse_config({**raw, "text_config": {**raw["text_config"], **change}}, "it")


def test_a_hybrid_is_rounded_to_four_bits_alone() -> None:
    config = parse_config(CONFIGS["qwen3.5:9b"][0], "it")
    assert is_packed(rounded_config(config, "int4", "it"))
    with pytest.raises(UsageError, match="hybrid"):
        rounded_config(config, "fp8", "it")


@pytest.mark.parametrize(
    "name", ["Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Gemma2", "Olmo2", "Granite"]
)
def test_where_a_config_is_silent_transformers_default_is_meant(name: str) -> None:
    default = getattr(transformers, f"{name}Config")(use_sliding_window=True)
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    raw = {field: getattr(default, field) for field in (*needed, "vocab_size")}
    raw |= {"architectures": [f"{name}ForCausalLM"], "max_position_embeddings": 8192}
    found = parse_config({**raw, "use_sliding_window": True}, "it")
    heads = default.num_attention_heads
    each = getattr(default, "head_dim", None) or default.hidden_size // heads
    assert (found.key_heads, found.head_dim) == (default.num_key_value_heads, each)
    assert (found.eps, found.tied) == (default.rms_norm_eps, default.tie_word_embeddings)
    assert found.rotation == Rotation(default.rope_parameters["rope_theta"])
    assert max(found.windows) == (getattr(default, "sliding_window", None) or 0)
    null = parse_config({**raw, "num_key_value_heads": None}, "it")
    assert null.key_heads == heads


def test_olmo_3_stretches_the_layers_without_a_window_alone() -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    raw = {**QWEN25, "architectures": ["Olmo3ForCausalLM"], "rope_theta": 5e5, "rope_scaling": yarn}
    raw["sliding_window"] = 4096
    found = parse_config({**raw, "num_hidden_layers": 4, "max_position_embeddings": 65536}, "it")
    assert isinstance(found.rotation.scaling, YarnScaling)
    assert found.windowed_rotation == Rotation(5e5)
    assert found.windows == (4096, 4096, 4096, 0)
    assert found.family.normed_projections
    assert found.family.post_normed
    plain = parse_config({**raw, "rope_scaling": None}, "it")
    assert (plain.rotation, plain.windowed_rotation) == (Rotation(5e5), None)


GEMMA4 = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "dtype": "bfloat16",
    "vision_config": {},
    "text_config": {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 60,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 1024,
        "use_bidirectional_attention": "vision",
    },
}


def test_gemma_4_is_read_with_the_shapes_of_its_layers() -> None:
    found = parse_config(GEMMA4, "it")
    assert (found.key_heads_of(4), found.head_dim_of(4)) == (16, 256)
    assert (found.key_heads_of(5), found.head_dim_of(5)) == (4, 512)
    assert (found.qkv_heads(4), found.qkv_heads(5)) == ((32, 16, 16), (32, 4))
    assert found.windows[3:7] == (1024, 1024, 0, 1024)
    assert found.rotation.radians(512, 64)[63:65] == (1e6 ** (-126 / 512), 0.0)
    assert (found.rotation_of(4), found.attention_scale) == (Rotation(1e4), 1.0)
    assert kv_token_bytes(found) == 2 * 2 * (50 * 16 * 256 + 10 * 4 * 512)


def test_a_small_gemma_4_shares_keys_and_has_inputs_of_each_layer() -> None:
    text = {"num_hidden_layers": 12, "num_kv_shared_layers": 6, "use_double_wide_mlp": True}
    shape = {**GEMMA4["text_config"], **text, "attention_k_eq_v": False}  # type: ignore[dict-item]
    del shape["hidden_size_per_layer_input"]
    found = parse_config({**GEMMA4, "text_config": shape}, "it")
    assert found.kv_layers == (0, 1, 2, 3, 4, 5)
    assert [found.kv_source(n) for n in (5, 6, 10, 11)] == [5, 4, 4, 5]
    assert found.qkv_heads(6) == (32,)
    assert found.intermediate_of(6) == 2 * found.intermediate_of(5)
    assert found.gemma is not None and found.gemma.input_columns == 256


MOE = {
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}


def test_gemma_4_with_experts_has_a_dense_layer_beside_them() -> None:
    found = parse_config({**GEMMA4, "text_config": {**GEMMA4["text_config"], **MOE}}, "it")  # type: ignore[dict-item]
    assert found.mixture == Mixture(128, 8, normalized=True, gelu=True)
    assert (found.intermediate, found.intermediate_of(0)) == (704, 21504)
    with pytest.raises(UsageError, match="beside a dense layer support bf16") as caught:
        rounded_config(found, "int4", "it")
    assert "Leave out --quantize" in caught.value.hint
    quantized = {**GEMMA4, "text_config": {**GEMMA4["text_config"], **MOE}}  # type: ignore[dict-item]
    with pytest.raises(ModelInvalid, match="experts quantized as AWQ"):
        parse_config({**quantized, "quantization_config": AWQ}, "it")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"global_head_dim": 320}, "heads of 320 columns"),
        ({"num_kv_shared_layers": 59}, "a kind of layer that is missing"),
        ({"layer_types": ["chunked_attention"] * 60}, "layers of kind chunked_attention"),
        ({"use_bidirectional_attention": "all"}, "later tokens"),
    ],
)
def test_other_gemma_4s_are_refused(change: dict[str, Any], words: str) -> None:
    text = {**GEMMA4["text_config"], **change}  # type: ignore[dict-item]
    with pytest.raises(ModelInvalid, match=words) as caught:
        parse_config({**GEMMA4, "text_config": text}, "it")
    if "kinds" not in words:
        assert "llama.cpp" in caught.value.hint


GRANITE4 = {
    **QWEN25,
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "num_hidden_layers": 2,
    "layer_types": ["attention"] * 2,
    "shared_intermediate_size": 512,
    "num_local_experts": 0,
}


def test_granite_4_is_read_with_and_without_experts_and_rotations() -> None:
    dense = parse_config({**GRANITE4, "position_embedding_type": "rope"}, "it")
    assert (dense.architecture, dense.mixture, dense.unrotated) == ("granite4", None, ())
    assert dense.intermediate == 512
    change = {"num_local_experts": 62, "num_experts_per_tok": 6, "intermediate_size": 256}
    mixed = parse_config({**GRANITE4, "position_embedding_type": "nope", **change}, "it")
    assert mixed.mixture == Mixture(62, 6, normalized=True, shared=2)
    assert (mixed.intermediate, mixed.unrotated) == (256, (True, True))


def test_granite_4_is_read_with_its_mamba_layers() -> None:
    sizes = {"mamba_n_heads": 4 * GRANITE4["hidden_size"] // 64, "mamba_expand": 4}
    found = parse_config(
        {**GRANITE4, **sizes, "layer_types": ["mamba", "attention"], "mamba_d_state": 128}, "it"
    )
    states = found.recurrent
    assert states is not None
    assert (states.layers, states.kind, states.value_dim) == ((True, False), "mamba", 64)
    assert (len(found.kv_layers), states.channels) == (
        1,
        states.values + 256,
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_types": ["linear_attention"] * 2}, "attention in none"),
        ({"layer_types": None}, "attention in none"),
        ({"layer_types": ["mamba", "mlp"]}, "attention in none"),
        ({"layer_types": ["attention", "mlp"]}, "a feed-forward part alone"),
        ({"mamba_d_state": 256}, "running states of 256 columns"),
        ({"mamba_d_head": 40}, "running states of 40 columns"),
        ({"mamba_d_conv": 3}, "convolutions over 3 tokens"),
        ({"mamba_n_groups": 3}, "not a multiple"),
        ({"mamba_proj_bias": True}, "biases in the projections"),
        ({"time_step_limit": [0.0, 0.1]}, "time steps limited"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "Mamba layers with the activation"),
    ],
)
def test_other_mamba_layers_are_refused(change: dict[str, Any], words: str) -> None:
    raw = {**GRANITE4, "layer_types": ["mamba", "attention"], "mamba_d_state": 64}
    with pytest.raises(ModelInvalid, match=words) as caught:
        parse_config({**raw, "mamba_n_heads": 4, "mamba_d_head": 64, **change}, "it")
    assert "llama.cpp" in caught.value.hint


def test_lfm2_is_read_with_the_names_of_its_first_configs() -> None:
    """As LiquidAI/LFM2-1.2B was published."""
    raw = {
        "architectures": ["Lfm2ForCausalLM"],
        "block_auto_adjust_ff_dim": True,
        "block_ff_dim": 12288,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "conv_L_cache": 3,
        "full_attn_idxs": [2, 5],
        "hidden_size": 2048,
        "norm_eps": 1e-05,
        "num_hidden_layers": 6,
        "tie_embedding": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 65536,
    }
    found = parse_config(raw, "it")
    states = found.recurrent
    assert states is not None
    assert (found.intermediate, found.eps, found.tied, found.head_dim) == (8192, 1e-5, True, 64)
    assert states.layers == (True, True, False, True, True, False)
    assert (states.columns, states.taps, found.state_bytes) == (6144, 3, 4 * 2 * 2048 * 2)
    with pytest.raises(ModelInvalid, match="convolutions over 9 tokens"):
        parse_config({**raw, "conv_L_cache": 9}, "it")


def test_nemotron_h_is_read_from_its_pattern() -> None:
    """As nvidia/NVIDIA-Nemotron-Nano-9B-v2 was published, with fewer layers."""
    raw = {
        "architectures": ["NemotronHForCausalLM"],
        "head_dim": 128,
        "hidden_size": 4480,
        "hybrid_override_pattern": "M-M*-",
        "intermediate_size": 15680,
        "layer_norm_epsilon": 1e-05,
        "mamba_head_dim": 80,
        "mamba_num_heads": 128,
        "mlp_hidden_act": "relu2",
        "num_attention_heads": 40,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "rope_theta": 10000,
        "ssm_state_size": 128,
        "torch_dtype": "bfloat16",
        "vocab_size": 131072,
    }
    found = parse_config(raw, "it")
    states = found.recurrent
    assert states is not None
    assert found.feeds == (False, True, False, False, True)
    assert (states.count, found.kv_layers, found.intermediate) == (2, (3,), 15680)
    assert (states.value_dim, states.columns) == (80, 2 * 10240 + 2 * 8 * 128 + 128)
    assert found.rotation_of(3) is None
    mixed = {"moe_intermediate_size": 1856, "n_routed_experts": 128, "num_experts_per_tok": 6}
    shared = {"moe_shared_expert_intermediate_size": 3712, "hybrid_override_pattern": "MEM*E"}
    experts = parse_config({**raw, **mixed, **shared}, "it")
    assert experts.mixture is not None
    assert (experts.expert_layers, experts.mixture.shared, experts.intermediate) == (2, 2, 1856)
    for change, words in (
        ({"moe_latent_size": 1024}, "experts over a latent"),
        ({"hybrid_override_pattern": "MX*"}, "layers of kind X"),
        ({"mlp_hidden_act": "silu"}, "the activation silu"),
    ):
        with pytest.raises(ModelInvalid, match=words):
            parse_config({**raw, **mixed, **shared, **change}, "it")


def test_gemma_2_is_read_where_its_config_is_silent() -> None:
    found = parse_config(CONFIGS["gemma-2-9b"][0], "it")
    assert (found.attention_cap, found.head_cap, found.tied) == (50.0, 30.0, True)
    assert found.windows[:3] == (4096, 0, 4096)
    assert found.windowed_rotation is None


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({}, (0, 0, 0, 0)),
        ({"use_sliding_window": True}, (0, 0, 0, 0)),
        ({"use_sliding_window": True, "max_window_layers": 3}, (0, 0, 0, 64)),
        (
            {
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            (0, 64, 0, 64),
        ),
        ({"architectures": ["MistralForCausalLM"]}, (64,) * 4),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (0,) * 4),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 32768}, (0,) * 4),
        ({"architectures": ["LlamaForCausalLM"]}, (0,) * 4),
    ],
)
def test_windows_are_those_of_the_layers(change: dict[str, Any], windows: tuple[int, ...]) -> None:
    raw = {**QWEN25, "num_hidden_layers": 4, "sliding_window": 64, **change}
    assert parse_config(raw, "it").windows == windows


@pytest.mark.parametrize(
    ("name", "mixture"),
    [
        ("qwen3:30b-a3b", Mixture(128, 8, normalized=True)),
        ("qwen1.5-moe:14b-a2.7b", Mixture(60, 4, normalized=False, shared=4, gated=True)),
        ("mixtral:8x7b", Mixture(8, 2, normalized=True)),
        ("gpt-oss:20b", Mixture(32, 4, normalized=True, biased=True, limit=7.0)),
        ("mistral:7b", None),
    ],
)
def test_experts_are_read(name: str, mixture: Mixture | None) -> None:
    assert parse_config(CONFIGS[name][0], name).mixture == mixture


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mlp_only_layers": [0]}, "layers with and without experts"),
        ({"decoder_sparse_step": 2}, "layers with and without experts"),
        ({"use_sliding_window": True, "sliding_window": 64}, "sliding windows in a mixture"),
        ({"num_experts_per_tok": 129}, "129 of 128 experts"),
        ({"num_experts": None}, "num_experts is missing"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "another activation than SiLU"),
        ({"quantization_config": FP8}, "experts quantized as FP8 .experts support bf16"),
        ({"quantization_config": {**GPTQ, "bits": 8}}, "experts quantized as GPTQ 8-bit"),
        ({"quantization_config": {**GPTQ, "desc_act": True}}, "4-bit with act-order"),
    ],
)
def test_experts_that_no_kernel_takes_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelInvalid, match=words) as caught:
        parse_config({**CONFIGS["qwen3:30b-a3b"][0], **change}, "it")
    assert caught.value.hint


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quantization_config": AWQ}, "experts quantized as AWQ 4-bit"),
        ({"intermediate_size": 2890}, "MXFP4 with intermediate_size 2890, which is not a multiple"),
        ({"swiglu_alpha": 1.0}, "gates have a slope of 1.0"),
        ({"attention_bias": False}, "without the biases"),
    ],
)
def test_forms_of_gpt_oss_that_no_kernel_takes_are_refused(
    change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelInvalid, match=words):
        parse_config({**CONFIGS["gpt-oss:20b"][0], **change}, "it")


def test_gpt_oss_has_windows_in_every_second_layer_and_is_never_rounded() -> None:
    config = parse_config(CONFIGS["gpt-oss:20b"][0], "it")
    assert config.windows == (128, 0) * 12
    floating = parse_config({**CONFIGS["gpt-oss:20b"][0], "quantization_config": None}, "it")
    with pytest.raises(UsageError, match="its experts support bf16 and MXFP4"):
        rounded_config(floating, "int4", "it")


def test_granite_divides_its_residual_by_its_factor() -> None:
    factors = {"embedding_multiplier": 12, "residual_multiplier": 0.5, "logits_scaling": 16}
    raw = {
        **QWEN25,
        "architectures": ["GraniteForCausalLM"],
        "attention_multiplier": 0.01,
        **factors,
    }
    found = parse_config(raw, "it")
    assert (found.embedding_scale, found.attention_scale) == (24.0, 0.01)
    assert (found.logits_divisor, found.eps) == (16.0, 4e-6)


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        ({}, [3, 7, 11]),
        ({"no_rope_layer_interval": 6}, [5, 11]),
        ({"no_rope_layers": [0] + [1] * 11}, [0]),
    ],
)
def test_smollm3_leaves_layers_unrotated(change: dict[str, Any], layers: list[int]) -> None:
    raw = {**QWEN25, "architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 12, **change}
    unrotated = parse_config(raw, "it").unrotated
    assert [layer for layer, each in enumerate(unrotated) if each] == layers


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("SeedOss", {}, "without the biases"),
        (
            "SeedOss",
            {"attention_bias": True, "attention_out_bias": True},
            "biases in the attention",
        ),
        ("SmolLM3", {"no_rope_layers": [1]}, "no_rope_layers is not a list of 28 numbers"),
    ],
)
def test_forms_of_plain_families_that_no_layer_has_are_refused(
    name: str, change: dict[str, Any], words: str
) -> None:
    raw = {**QWEN25, "attention_bias": False, "architectures": [f"{name}ForCausalLM"], **change}
    with pytest.raises(ModelInvalid, match=words):
        parse_config(raw, "it")


def test_positions_of_models_that_see_are_plain_for_text() -> None:
    raw = {**QWEN25, "architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {}}
    found = parse_config({**raw, "rope_scaling": {"type": "mrope", "mrope_section": [16]}}, "it")
    assert (found.architecture, found.vision) == ("qwen2", True)
    assert found.rotation == Rotation(1e6)


def test_a_shared_expert_is_as_wide_as_whole_experts() -> None:
    raw = {**CONFIGS["qwen1.5-moe:14b-a2.7b"][0], "shared_expert_intermediate_size": 5000}
    with pytest.raises(ModelInvalid, match="5000 columns, which is not a multiple of 1408"):
        parse_config(raw, "it")


@pytest.mark.parametrize(("to", "possible"), [("int4", True), ("int8", False), ("fp8", False)])
def test_experts_are_rounded_to_4_bits_alone(to: RoundedType, possible: bool) -> None:
    config = parse_config(CONFIGS["mixtral:8x7b"][0], "it")
    if possible:
        assert is_packed(rounded_config(config, to, "it"))
        return
    with pytest.raises(UsageError, match=f"cannot be rounded to {to}"):
        rounded_config(config, to, "it")


def test_a_missing_number_is_named() -> None:
    with pytest.raises(ModelInvalid, match="hidden_size is missing") as caught:
        parse_config({**QWEN25, "hidden_size": None}, "it")
    assert caught.value.hint


@pytest.mark.parametrize("field", ["vocab_size", "num_hidden_layers", "rms_norm_eps"])
@pytest.mark.parametrize("value", ["x", -1, 0, True, 1e30, 1 << 29])
def test_nonsense_numbers_are_named(field: str, value: object) -> None:
    if field != "num_hidden_layers" and value == 1 << 29:
        return
    with pytest.raises(ModelInvalid, match=field):
        parse_config({**QWEN25, field: value}, "it")


@pytest.mark.parametrize(
    ("name", "raw", "wanted"),
    [
        (
            "quantize_config.json",
            {"bits": 4, "group_size": 128, "desc_act": True, "sym": False},
            Quantization("gptq", act_order=True, zeros_minus_one=True),
        ),
        (
            "quant_config.json",
            {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"},
            Quantization("awq"),
        ),
        (
            "hf_quant_config.json",
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
            Quantization("fp8", 8, 0, symmetric=True, fp8_activations=True),
        ),
    ],
)
def test_early_checkpoints_have_their_quantization_in_a_separate_file(
    name: str, raw: dict[str, Any], wanted: Quantization, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN25))
    (tmp_path / name).write_text(json.dumps(raw))
    assert read_config(tmp_path).quantization == wanted
    (tmp_path / "config.json").write_text(json.dumps({**QWEN25, "quantization_config": AWQ}))
    assert read_config(tmp_path).quantization == Quantization("awq")
    (tmp_path / "config.json").write_text(json.dumps(QWEN25))
    (tmp_path / name).write_text("[1]")
    with pytest.raises(ModelInvalid, match="not a JSON object"):
        read_config(tmp_path)


def test_invalid_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match=r"no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(ModelInvalid, match="is not valid JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelInvalid, match="not a JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN25))
    assert read_config(tmp_path).vocabulary == 152064
