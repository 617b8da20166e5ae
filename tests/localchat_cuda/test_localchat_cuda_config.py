import json
from pathlib import Path
from typing import Any

import pytest

from localchat.errors import ModelInvalid, ModelMissing
from localchat_cuda.config import parse_config, read_config
from localchat_cuda.rotation import Llama3, Rotation

QWEN25: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "sliding_window": 131072,
    "eos_token_id": 151645,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def test_qwen25_is_read() -> None:
    found = parse_config(QWEN25, "it")
    assert (found.architecture, found.layers, found.head_dim) == ("qwen2", 28, 128)
    assert found.qkv_columns == 36 * 128
    assert found.biased and not found.normed_heads
    assert found.quantization is None and not found.packed
    assert (found.rotation, found.ends) == (Rotation(1e6), (151645,))
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
    assert found.rotation == Rotation(5e5, Llama3(8.0, 1.0, 4.0, 8192))
    assert found.ends == (1, 2)
    assert not found.biased


def test_awq_and_qwen3_are_read() -> None:
    raw = {
        **QWEN25,
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 96,
        "quantization_config": AWQ,
    }
    found = parse_config(raw, "it")
    assert found.packed and found.normed_heads and found.head_dim == 96


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": None}, "of no name"),
        ({"num_attention_heads": 27}, "no multiple"),
        ({"head_dim": 80}, "heads of 80"),
        ({"use_bidirectional_attention": True}, "later tokens"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"quantization_config": {**AWQ, "group_size": 64}}, "groups of 64"),
        ({"torch_dtype": "float8"}, "float8"),
    ],
)
def test_what_cannot_run_is_refused_with_what_can(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelInvalid, match=words) as caught:
        parse_config({**QWEN25, **change}, "it")
    assert "Qwen3" in caught.value.hint
    assert "llama.cpp" in caught.value.hint


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "rms_norm_eps"])
@pytest.mark.parametrize("value", ["x", -1, 0, True])
def test_nonsense_numbers_are_named(field: str, value: object) -> None:
    if field == "rms_norm_eps" and value is True:
        return
    with pytest.raises(ModelInvalid, match=field):
        parse_config({**QWEN25, field: value}, "it")


def test_files_that_are_none_are_told(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match=r"no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(ModelInvalid, match="cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelInvalid, match="no JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN25))
    assert read_config(tmp_path).vocabulary == 152064
