"""Experts of gpt-oss: what a load takes is what was planned, and damage is named."""

from pathlib import Path

import pytest
import safetensors.torch

from localchat.errors import ModelInvalid
from localchat.model_files.safetensors import read_safetensors
from localchat_cuda.config.reader import read_config
from localchat_cuda.load import random_weights
from localchat_cuda.plan.weight_sizes import dummy_bytes, weights_bytes
from localchat_cuda.weights.loader import load
from localchat_cuda.weights.source import CheckpointWeights
from tests.support import tiny_models
from tests.support.tiny_models import CPU


@pytest.mark.parametrize("mxfp4", [False, True])
def test_experts_take_the_planned_memory(mxfp4: bool, tmp_path: Path) -> None:
    save = tiny_models.save_mxfp4 if mxfp4 else tiny_models.save
    save(tiny_models.reference("gpt-oss"), tmp_path)
    config = read_config(tmp_path)
    headers = [read_safetensors(path) for path in tmp_path.glob("*.safetensors")]
    for source in (CheckpointWeights(tmp_path, CPU), random_weights(config, CPU)):
        # Each router has a counter of four bytes, which no plan contains.
        taken = load(config, source, CPU).bytes - 4 * config.layers
        assert taken == weights_bytes(config, headers) == dummy_bytes(config)


def test_scales_that_no_kernel_takes_are_named(tmp_path: Path) -> None:
    tiny_models.save_mxfp4(tiny_models.reference("gpt-oss"), tmp_path)
    path, name = tmp_path / "model.safetensors", "model.layers.1.mlp.experts.down_proj_scales"
    held = safetensors.torch.load_file(path)
    held[name][0, 0, 0] = 200
    safetensors.torch.save_file(held, path)
    with pytest.raises(ModelInvalid, match=r"experts model.layers.1.mlp.experts.* cannot be read"):
        load(read_config(tmp_path), CheckpointWeights(tmp_path, CPU), CPU)
