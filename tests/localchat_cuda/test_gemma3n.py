"""Gemma 3n: streams of the residual, rows of a second embedding, and layers that read others' keys."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localchat.errors import ModelInvalid
from localchat.fit.load_options import LoadOptions
from localchat.model_files.safetensors import read_safetensors
from localchat_cuda.compile_ahead import trace
from localchat_cuda.config.model import rounded_config
from localchat_cuda.config.reader import parse_config, read_config
from localchat_cuda.config.rope import Rotation
from localchat_cuda.plan import memory_plan
from localchat_cuda.plan.weight_sizes import dummy_bytes, input_rows, token_bytes, weights_bytes
from localchat_cuda.weights.formats.weight import Weight, dequantized
from localchat_cuda.weights.loader import load
from localchat_cuda.weights.model_weights import LayerWeights
from localchat_cuda.weights.source import CheckpointWeights, RandomWeights
from tests.support import tiny_models
from tests.support.cuda_machines import GB, gpu
from tests.support.hub_configs import CONFIGS
from tests.support.tiny_engine_core import ON_GPU, TinyLoop, assert_same, request, tiny_runner
from tests.support.tiny_models import CPU, VOCABULARY, Tiny, tokens_of

E2B, E4B = (CONFIGS[f"gemma-3n-{name}"][0] for name in ("e2b", "e4b"))
FLOATING = ("laurel_left", "laurel_right", "input_gate", "input_projection")
WIDE = {"hidden_size": 256, "intermediate_size": 384}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("gemma3n")
    model = tiny_models.reference("gemma3n", **WIDE)
    tiny_models.save(model, folder, "1GB")
    return model, folder


def wanted_of(model: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return found


def take_rounded(layer: LayerWeights, theirs: Any) -> None:
    """Let a layer of transformers compute with what ours was rounded to."""
    attention, mlp = theirs.self_attn, theirs.mlp
    parts = [attention.q_proj]
    if not attention.is_kv_shared_layer:
        parts += [attention.k_proj, attention.v_proj]
    fields = {
        "qkv": parts,
        "o": [attention.o_proj],
        "gate_up": [mlp.gate_proj, mlp.up_proj],
        "down": [mlp.down_proj],
    }
    with torch.no_grad():
        for field, linears in fields.items():
            whole = dequantized(layer.linears[field], torch.float32)
            rows = [each.weight.shape[0] for each in linears]
            for linear, weight in zip(linears, torch.split(whole, rows), strict=True):
                linear.weight.copy_(weight)


@pytest.mark.skipif(ON_GPU, reason="tokens as likely as each other part in fp16")
def test_64_greedy_tokens_are_transformers(pair: tuple[Any, Path]) -> None:
    model, folder = pair
    prompt = tokens_of(41, 60)
    found = TinyLoop(tiny_runner(folder, step=24)).say(request(prompt, max_tokens=64)).tokens()
    with torch.no_grad():
        whole = model.generate(
            torch.tensor([prompt]), max_new_tokens=64, do_sample=False, pad_token_id=0
        )
    assert found == whole[0, len(prompt) :].tolist()


def test_tokens_beyond_the_second_embedding_read_its_first_row(pair: tuple[Any, Path]) -> None:
    """As those of images and sounds do."""
    model, folder = pair
    tokens = (3, VOCABULARY - 1, 5, VOCABULARY - 10, VOCABULARY - 11)
    found = Tiny(folder, torch.float32).prompt(tokens, 5)
    assert torch.allclose(found, wanted_of(model, tokens), atol=2e-3, rtol=1e-4)


def test_a_warm_cache_on_the_device_and_in_host_memory_gives_the_same_text(
    pair: tuple[Any, Path],
) -> None:
    loop = TinyLoop(tiny_runner(pair[1], blocks=6, host_blocks=40))
    asked = request(tokens_of(11, 150), max_tokens=20, salt="a")
    cold, warm = loop.say(asked), loop.say(asked)
    for number in range(3):
        loop.say(request(tokens_of(number, 200), salt="b", speculation=False))
    assert_same(cold, warm)
    assert_same(cold, loop.say(asked))


@pytest.mark.parametrize("to", ["fp8", "int8", "int4"])
def test_what_reads_rows_without_a_norm_is_never_rounded(to: Any, pair: tuple[Any, Path]) -> None:
    model, folder = pair
    config = rounded_config(read_config(folder), to, "it")
    source = CheckpointWeights(folder, CPU)
    held = load(config, source, CPU)
    for layer in held.layers:
        kept: list[Weight] = [layer.linears[name] for name in FLOATING]
        assert all(isinstance(each, torch.Tensor) for each in kept)
        assert not isinstance(layer.linears["qkv"], torch.Tensor)
    assert not held.packed
    planned = weights_bytes(config, source.headers.values())
    assert held.bytes <= planned <= 1.001 * held.bytes
    random = load(config, RandomWeights(CPU), CPU)
    assert random.bytes == held.bytes
    assert random.bytes <= dummy_bytes(config) <= 1.001 * random.bytes
    ours, rounded, tokens = Tiny(folder, torch.float32), deepcopy(model), tokens_of(42, 30)
    ours.weights = load(config, source, CPU, dtype=torch.float32)
    for layer, theirs in zip(ours.weights.layers, rounded.model.layers, strict=True):
        take_rounded(layer, theirs)
    found, wanted = ours.prompt(tokens, 30), wanted_of(rounded, tokens)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-4
    assert not torch.allclose(found, wanted_of(model, tokens), atol=1e-2)


def test_the_plan_has_the_second_embedding_and_the_streams_on_the_gpu(
    pair: tuple[Any, Path],
) -> None:
    config = parse_config(E4B, "it")
    assert 2 * input_rows(config) == 2 * 262_144 * 35 * 256
    found = memory_plan.plan(config, [], LoadOptions(dummy_weights=True), gpu(20 * GB))
    assert found.weights_bytes == dummy_bytes(config) > 2 * input_rows(config)
    assert found.fits
    tight = memory_plan.plan(config, [], LoadOptions(dummy_weights=True), gpu(14 * GB))
    assert not tight.fits
    assert config.gemma is not None
    plain = replace(config, gemma=replace(config.gemma, altup=None))
    streams = 2048 * 2 * 4 * 2048 * 4
    work = memory_plan.workspace_bytes(config, 1, 2048)
    assert work - memory_plan.workspace_bytes(plain, 1, 2048) == streams
    header = read_safetensors(pair[1] / "model.safetensors")
    tiny = read_config(pair[1])
    assert weights_bytes(tiny, [header]) == 4 * sum(map(torch.numel, pair[0].parameters()))


def test_a_token_reads_one_row_of_the_second_embedding() -> None:
    config = parse_config(E2B, "it")
    assert token_bytes(config, dummy_bytes(config)) == dummy_bytes(config) - 2 * input_rows(config)


def test_a_config_is_read_with_its_streams_and_its_kinds_of_layers() -> None:
    found = parse_config(E2B, "it")
    assert found.windows[3:6] == (512, 0, 512)
    assert (found.rotation, found.rotation_of(0)) == (Rotation(1e6), Rotation(1e4))
    assert (found.attention_scale, found.head_cap, found.embedding_scale) == (1.0, 30.0, 2048**0.5)
    assert (found.qkv_heads(19), found.qkv_heads(20)) == ((8, 2, 2), (8,))
    assert [found.kv_source(n) for n in (19, 20, 24, 29)] == [19, 18, 19, 19]
    assert memory_plan.kv_token_bytes(found) == 2 * 2 * 20 * 2 * 256
    assert found.gemma is not None
    altup = found.gemma.altup
    assert altup is not None
    assert (altup.streams, altup.laurel_rank, altup.scaled) == (4, 64, True)
    assert altup.cutoff(9) == pytest.approx(1.6449, abs=1e-4)
    assert altup.cutoff(10) is None
    assert replace(altup, sparsities=(0.5,)).cutoff(0) == 0.0


def test_a_config_that_names_no_layers_has_those_of_transformers() -> None:
    text = {"num_hidden_layers": 35, "hidden_size": 2048, "intermediate_size": 16384}
    assert parse_config({**E4B, "text_config": text}, "it") == parse_config(E4B, "it")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"altup_active_idx": 1}, "4 streams of the residual, of which 1 is active"),
        ({"altup_num_inputs": 1}, "1 streams of the residual"),
        ({"intermediate_size": [8192] * 29}, "intermediate_size is not a list of 30"),
        ({"intermediate_size": [0] * 30}, "intermediate_size is 0"),
        ({"activation_sparsity_pattern": [1.0] * 30}, "not a list of 30 shares"),
        ({"activation_sparsity_pattern": 0.95}, "not a list of 30 shares"),
        ({"num_kv_shared_layers": 30}, "a kind of layer that is missing"),
    ],
)
def test_other_configs_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelInvalid, match=words):
        parse_config({**E2B, "text_config": {**E2B["text_config"], **change}}, "it")


def test_sparse_layers_are_a_kind_to_compile_for() -> None:
    kept = trace.one_layer_per_kind(parse_config(E2B, "it"))
    assert kept.gemma is not None
    assert kept.gemma.altup is not None
    sparse = [kept.gemma.altup.cutoff(n) is not None for n in range(kept.layers)]
    assert sparse == [True, True, *[False] * 5]
    assert kept.windows == (512, 0, 512, 0, 512, 0, 0)
    assert [kept.kv_source(n) for n in range(kept.layers)] == [0, 1, 2, 3, 2, 3, 3]
