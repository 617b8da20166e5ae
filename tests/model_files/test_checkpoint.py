"""Facts about a checkpoint that are known before its weights are read."""

import json
from pathlib import Path
from typing import Any

import pytest

from localchat.errors import ModelInvalid, ModelMissing
from localchat.model_files.checkpoint import Checkpoint, read_checkpoint, read_summary, weight_paths

EMPTY = (2).to_bytes(8, "little") + b"{}"


def compressed(weights: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


@pytest.mark.parametrize(
    ("stated", "label"),
    [
        ({"quant_method": "gptq"}, "GPTQ"),
        (compressed({"type": "int", "num_bits": 4}), "INT4"),
        (compressed({"type": "float", "num_bits": 8}), "FP8"),
        (compressed({"type": "float", "num_bits": 8, "group_size": 32}), "MXFP8"),
        (compressed({"type": "float", "num_bits": 4, "group_size": 16}), "NVFP4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "MXFP8"}}, "MXFP8"),
        ({"quant_method": "modelopt"}, "MODELOPT"),
        (compressed(None), "COMPRESSED-TENSORS"),
    ],
)
def test_a_checkpoint_names_its_quantization(stated: dict[str, Any], label: str) -> None:
    assert Checkpoint("it", {"quantization_config": stated}, ()).quantization == label


def test_an_early_checkpoint_tells_its_quantization_in_a_file_beside(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(EMPTY)
    beside = tmp_path / "quantize_config.json"
    beside.write_text('{"bits": 4, "group_size": 128}')
    found = read_checkpoint(tmp_path)
    assert found.quantization == "GPTQ"
    assert found.config["quantization_config"]["group_size"] == 128
    beside.write_text("{")
    with pytest.raises(ModelInvalid, match=r"quantize_config\.json is not valid JSON"):
        read_checkpoint(tmp_path)


def test_for_weights_of_chance_the_settings_are_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "quant_config.json").write_text('{"w_bit": 4}')
    with pytest.raises(ModelInvalid, match="is a folder"):
        read_summary(tmp_path)
    found = read_summary(tmp_path, dummy_weights=True)
    assert isinstance(found, Checkpoint)
    assert (found.headers, found.quantization) == ((), "AWQ")


def test_the_index_of_a_split_model_decides_about_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    index = tmp_path / "model.safetensors.index.json"
    parts = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    index.write_text(json.dumps({"weight_map": dict(zip("abc", parts, strict=True))}))
    # The config alone is enough for random weights.
    assert weight_paths(tmp_path) == []
    for name in (*parts, "model-00001-of-00002.safetensors"):
        (tmp_path / name).write_bytes(EMPTY)
    assert [path.name for path in weight_paths(tmp_path)] == parts
    (tmp_path / parts[1]).unlink()
    with pytest.raises(ModelMissing, match=rf"1 of the 3 parts .* {parts[1]}"):
        read_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(EMPTY)
    assert tmp_path / "model.safetensors" in weight_paths(tmp_path)
    for content in ("{", "[]", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'):
        index.write_text(content)
        assert len(weight_paths(tmp_path)) == 4
