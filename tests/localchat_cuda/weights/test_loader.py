import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from localchat.errors import EngineClosed, ModelInvalid, ModelMissing
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.config.reader import read_config
from localchat_cuda.kernels.int4 import pack as w4_pack
from localchat_cuda.weights.loader import load
from localchat_cuda.weights.model_weights import ModelWeights
from localchat_cuda.weights.source import CheckpointWeights, read_headers
from tests.support import tiny_models
from tests.support.awq import to_awq
from tests.support.tiny_models import CPU


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen2")
    tiny_models.save(tiny_models.reference("qwen2"), path)
    return path


def loaded(folder: Path, config: ModelConfig, **how: object) -> ModelWeights:
    return load(config, CheckpointWeights(folder, CPU), CPU, **how)  # type: ignore[arg-type]


def test_shards_are_read_and_parts_merged(folder: Path) -> None:
    assert len(read_headers(folder)) > 1
    found = loaded(folder, read_config(folder), dtype=torch.float32)
    whole: dict[str, torch.Tensor] = {}
    for path in read_headers(folder):
        whole |= safetensors.torch.load_file(path)
    wanted = [whole[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(found.layers[1].linears["qkv"], torch.cat(wanted))  # type: ignore[arg-type]
    biases = [whole[f"model.layers.1.self_attn.{part}_proj.bias"] for part in "qkv"]
    assert torch.equal(found.layers[1].biases["qkv"], torch.cat(biases))
    assert found.head is found.embedding
    assert found.bytes == sum(each.numel() * 4 for each in whole.values())


def test_the_checkpoints_type_is_kept_unless_another_is_asked(folder: Path) -> None:
    config = read_config(folder)
    assert loaded(folder, config).embedding.dtype == torch.float32
    assert loaded(folder, config, dtype=torch.float16).embedding.dtype == torch.float16


def test_a_load_can_be_stopped(folder: Path) -> None:
    told: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> bool:
        told.append((done, total))
        return False

    with pytest.raises(EngineClosed):
        loaded(folder, read_config(folder), progress=progress)
    assert told == [(1, 2)]


def test_awq_layers_are_packed_as_their_parts(tmp_path: Path) -> None:
    model = tiny_models.reference("qwen2")
    tiny_models.save_awq(model, tmp_path)
    found = loaded(tmp_path, read_config(tmp_path))
    gate_up = found.layers[0].linears["gate_up"]
    assert isinstance(gate_up, w4_pack.W4)
    mlp = model.model.layers[0].mlp
    wanted = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
    assert torch.equal(w4_pack.dense(gate_up), wanted)


def test_layers_left_out_of_a_quantization_stay_floating(tmp_path: Path) -> None:
    model = tiny_models.reference("qwen2")
    tiny_models.save_awq(model, tmp_path, floating="1.mlp.up_proj")
    found = loaded(tmp_path, read_config(tmp_path), dtype=torch.float32)
    assert isinstance(found.layers[0].linears["gate_up"], w4_pack.W4)
    mlp = model.model.layers[1].mlp
    wanted = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
    assert torch.equal(found.layers[1].linears["gate_up"], wanted)  # type: ignore[arg-type]
    assert isinstance(found.layers[1].linears["down"], w4_pack.W4)
    assert not found.packed


def test_a_quantized_head_is_refused(tmp_path: Path) -> None:
    tiny_models.save_awq(tiny_models.reference("qwen3"), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["lm_head.qweight"] = tensors.pop("lm_head.weight").to(torch.int32)
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(ModelInvalid, match="lm_head is quantized"):
        loaded(tmp_path, read_config(tmp_path))


def test_biases_of_zeros_are_nothing_and_others_are_refused(tmp_path: Path) -> None:
    tiny_models.save_awq(tiny_models.reference("qwen3"), tmp_path)
    path, name = tmp_path / "model.safetensors", "model.layers.1.mlp.down_proj.bias"
    tensors = safetensors.torch.load_file(path)
    tensors[name] = torch.zeros(128)
    safetensors.torch.save_file(tensors, path)
    assert loaded(tmp_path, read_config(tmp_path)).packed
    tensors[name][5] = 1.0
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(ModelInvalid, match=r"1\.mlp\.down_proj\.bias"):
        loaded(tmp_path, read_config(tmp_path))


@pytest.mark.parametrize("equal", [True, False])
def test_a_stored_head_is_used_if_it_differs_from_the_tied_embedding(
    equal: bool, folder: Path, tmp_path: Path
) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for path in read_headers(folder):
        tensors |= safetensors.torch.load_file(path)
    own = tensors["model.embed_tokens.weight"] + (0 if equal else 1)
    safetensors.torch.save_file({**tensors, "lm_head.weight": own}, tmp_path / "model.safetensors")
    config, said = read_config(folder), list[str]()
    found = loaded(tmp_path, config, notify=said.append)
    assert config.tied
    assert (found.head is found.embedding) is equal
    assert torch.equal(found.head, own)  # type: ignore[arg-type]
    assert [("lm_head.weight" in line, "differ" in line) for line in said] == [(True, True)] * (
        not equal
    )


def test_unread_tensors_are_reported(folder: Path, tmp_path: Path) -> None:
    config, said = read_config(folder), list[str]()
    loaded(folder, config, notify=said.append)
    assert not said
    loaded(folder, replace(config, layers=1), notify=said.append)
    assert "model.layers.1.input_layernorm.weight and 11 more" in said[0]


def test_a_lacking_quantized_layer_is_named(tmp_path: Path) -> None:
    tiny_models.save_awq(tiny_models.reference("qwen2"), tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.qweight"]
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelInvalid, match=r"lacks the tensor .*up_proj\.qweight"):
        loaded(tmp_path, read_config(tmp_path))


def test_a_missing_shard_is_named_and_a_stale_one_left_alone(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    first, *_, last = sorted(read_headers(tmp_path))
    tensors = safetensors.torch.load_file(first)
    stale = {name: torch.zeros_like(each) for name, each in tensors.items()}
    for name in ("model-00000-of-00002.safetensors", "model-99999-of-99999.safetensors"):
        safetensors.torch.save_file(stale, tmp_path / name)
    found, wanted = (loaded(each, read_config(folder)) for each in (tmp_path, folder))
    assert torch.equal(found.embedding, wanted.embedding)
    last.unlink()
    with pytest.raises(ModelMissing, match=f"parts of .* are missing: {last.name}"):
        loaded(tmp_path, read_config(folder))


def test_a_missing_shard_and_a_wrong_shape_are_named(folder: Path, tmp_path: Path) -> None:
    config = read_config(folder)
    with pytest.raises(ModelMissing, match="no safetensors file"):
        CheckpointWeights(tmp_path, CPU)
    first = min(read_headers(folder))
    (tmp_path / first.name).write_bytes(first.read_bytes())
    with pytest.raises(ModelInvalid, match="lacks the tensor"):
        loaded(tmp_path, config)
    with pytest.raises(ModelInvalid, match="but config"):
        loaded(folder, replace(config, vocabulary=161))


@pytest.mark.parametrize(
    "kind", [torch.int8, torch.int32, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_codes_without_a_quantization_are_not_taken_for_weights(
    kind: torch.dtype, folder: Path, tmp_path: Path
) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for path in read_headers(folder):
        tensors |= safetensors.torch.load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(kind)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelInvalid, match=r"up_proj\.weight is stored as") as caught:
        loaded(tmp_path, read_config(folder))
    assert "quantization_config" in caught.value.hint


def test_a_lost_file_or_an_unknown_dtype_is_named(tmp_path: Path) -> None:
    model = tiny_models.reference("qwen2")
    tiny_models.save(model, tmp_path, shards="1GB")
    path, source = tmp_path / "model.safetensors", CheckpointWeights(tmp_path, CPU)
    data = path.read_bytes()
    path.unlink()
    with pytest.raises(ModelInvalid, match="cannot be read"):
        source.tensor("model.norm.weight", (128,), torch.float32)
    path.write_bytes(data.replace(b'"F32"', b'"X32"'))
    source = CheckpointWeights(tmp_path, CPU)
    with pytest.raises(ModelInvalid, match="cannot be read: unknown type 'X32'"):
        source.tensor("model.norm.weight", (128,), torch.float32)


def test_experts_are_stacked_with_the_parts_of_a_shared_one(tmp_path: Path) -> None:
    model = tiny_models.reference("qwen2-moe")
    tiny_models.save_awq(model, tmp_path)
    found = loaded(tmp_path, read_config(tmp_path), dtype=torch.float32)
    held, mlp = found.layers[1].experts, model.model.layers[1].mlp
    assert held is not None
    assert torch.equal(
        held.router.weight, torch.cat((mlp.gate.weight, mlp.shared_expert_gate.weight))
    )
    assert isinstance(held.gate_up, w4_pack.W4)
    assert isinstance(held.down, w4_pack.W4)
    gate, up = mlp.shared_expert.gate_proj.weight, mlp.shared_expert.up_proj.weight
    shared = torch.cat((gate[:128], up[:128], gate[128:], up[128:]))
    experts = mlp.experts.gate_up_proj.flatten(0, 1)
    assert torch.equal(w4_pack.dense(held.gate_up), torch.cat((experts, shared)))
    parts = mlp.shared_expert.down_proj.weight.chunk(2, 1)
    wanted = torch.cat((mlp.experts.down_proj.flatten(0, 1), *parts))
    assert torch.equal(w4_pack.dense(held.down), wanted)
    assert found.packed


def test_a_layers_experts_may_all_be_floating_and_not_some_of_them(tmp_path: Path) -> None:
    model = tiny_models.reference("mixtral")
    tiny_models.save_awq(model, tmp_path, floating="layers.1.mlp.experts")
    found = loaded(tmp_path, read_config(tmp_path), dtype=torch.float32)
    first, second = (layer.experts for layer in found.layers)
    assert first is not None
    assert second is not None
    assert isinstance(first.down, w4_pack.W4)
    assert isinstance(second.down, torch.Tensor)
    path, name = tmp_path / "model.safetensors", "model.layers.0.block_sparse_moe.experts.1.w2"
    tensors = safetensors.torch.load_file(path)
    for part in ("qweight", "qzeros", "scales"):
        del tensors[f"{name}.{part}"]
    tensors[f"{name}.weight"] = torch.zeros(128, 128)
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(ModelInvalid, match=r"experts\.\{\}\.w2 cannot be joined"):
        loaded(tmp_path, read_config(tmp_path))


def test_a_quantized_router_is_floating_once_loaded(tmp_path: Path) -> None:
    model = tiny_models.reference("mixtral", num_local_experts=16)
    tiny_models.save_awq(model, tmp_path)
    path, name = tmp_path / "model.safetensors", "model.layers.0.block_sparse_moe.gate"
    tensors = safetensors.torch.load_file(path)
    del tensors[f"{name}.weight"]
    codes, zeros = torch.randint(0, 16, (16, 128)), torch.full((16, 1), 7)
    scales = torch.full((16, 1), 0.5).half()
    parts = zip(("qweight", "qzeros", "scales"), to_awq(codes, scales, zeros), strict=True)
    safetensors.torch.save_file(tensors | {f"{name}.{part}": each for part, each in parts}, path)
    found = loaded(tmp_path, read_config(tmp_path), dtype=torch.float32).layers[0].experts
    assert found is not None
    assert torch.equal(found.router.weight, (codes - 7) * 0.5)
