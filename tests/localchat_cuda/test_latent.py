"""Multi-head latent attention in a runner: caches, preemption, formats of weights and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from localchat.backend_api.interface import LoadBlock, SaveBlock, StepPlan
from localchat.engine.events import Prefill
from localchat.errors import ModelInvalid, UsageError
from localchat.fit.load_options import LoadOptions
from localchat.model_files.safetensors import SafetensorsHeader, Tensor, read_safetensors
from localchat_cuda.config.model import rounded_config
from localchat_cuda.config.reader import parse_config, read_config
from localchat_cuda.plan.memory_plan import kv_token_bytes, kv_types, plan
from localchat_cuda.plan.weight_sizes import token_bytes, unpacked_bytes, weights_bytes
from localchat_cuda.weights.loader import load
from localchat_cuda.weights.source import CheckpointWeights
from scripts.bench.cuda.stress import stress
from tests.support import quantizers, tiny_models
from tests.support.cuda_configs import AWQ
from tests.support.cuda_machines import GB, gpu
from tests.support.hub_configs import CONFIGS
from tests.support.quantizers import Way
from tests.support.tiny_engine_core import (
    DEVICE,
    TinyLoop,
    assert_same,
    request,
    tiny_runner,
)
from tests.support.tiny_models import CPU, Tiny, reference_logits, tokens_of

KINDS = ("deepseek-v2", "deepseek-v2-q", "glm4-moe-lite")
LITE, FLASH = CONFIGS["deepseek-v2-lite"][0], CONFIGS["glm-4.7-flash"][0]
PROMPT = tokens_of(11, 150)
ASKED = request(PROMPT, max_tokens=20, salt="a")


@pytest.fixture(scope="module", params=["deepseek-v2", "glm4-moe-lite"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp(request.param)
    tiny_models.save(tiny_models.reference(request.param), found)
    return found


# ---------------------------------------------------------------------------- host memory


def test_a_preempted_sequence_is_copied_back(folder: Path) -> None:
    loop = TinyLoop(tiny_runner(folder, blocks=5, host_blocks=20))
    asked = request(PROMPT, max_tokens=30, salt="a")
    loop.ask(request(tokens_of(12, 100), max_tokens=100))
    id_ = loop.ask(asked)
    loop.run_until_idle()
    assert loop.core.stats().preemptions
    assert_same(TinyLoop(tiny_runner(folder)).say(asked), loop.received[id_])


def test_a_warm_cache_on_the_device_and_in_host_memory_gives_the_same_text(folder: Path) -> None:
    loop = TinyLoop(tiny_runner(folder, blocks=6, host_blocks=40))
    cold, warm = loop.say(ASKED), loop.say(ASKED)
    for number in range(3):
        loop.say(request(tokens_of(number, 200), salt="b", speculation=False))
    swapped = loop.say(ASKED)
    for told in (warm, swapped):
        assert_same(cold, told)
        [prefill, *_] = [event for event in told.events if isinstance(event, Prefill)]
        assert prefill.cached >= 128


def test_a_page_of_latents_comes_back_bit_for_bit(folder: Path) -> None:
    runner = tiny_runner(folder, blocks=3, host_blocks=2, dtype=torch.bfloat16)
    pages = runner.model.pages
    assert pages.page_bytes == 64 * kv_token_bytes(runner.model.config, "bf16") // 2
    pool = pages.pools[0].view(torch.int16)
    with runner.on_stream():
        pool.copy_(torch.randint(-9999, 9999, pool.shape, dtype=torch.int16, device=DEVICE))
        held = pool[:, 1].clone()
    runner.launch(StepPlan(1, memory=(SaveBlock(1, 0), LoadBlock(0, 2))))
    runner.collect()
    assert torch.equal(pool[:, 2], held)
    runner.close()


def test_random_requests_leave_no_state(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.reference("deepseek-v2"), tmp_path)
    runner = tiny_runner(tmp_path, blocks=9, slots=6, context=256, step=48, host_blocks=12)
    told = stress(runner, 25, seed=2)
    assert told["answered"] + told["cancelled"] + told["refused"] == 25


# ---------------------------------------------------------------------------- weights


@pytest.mark.parametrize("stored", ["awq", "gptq", "compressed", "some floating"])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_four_bits_are_transformers(kind: str, stored: str, tmp_path: Path) -> None:
    model = tiny_models.reference(kind)
    match stored:
        case "awq":
            tiny_models.save_awq(model, tmp_path)
        case "some floating":
            tiny_models.save_awq(model, tmp_path, "kv_")
        case _:
            quantizers.save(model, tmp_path, Way(symmetric=True), 0 if stored[0] == "c" else 1)
    tokens = tokens_of(7, 40)
    ours, wanted = Tiny(tmp_path, torch.float32), reference_logits(model, tokens)
    for packed in (False, True) if ours.weights.packed else (False,):
        apart = (ours.prompt(tokens, 16, packed=packed) - wanted).norm(dim=1) / wanted.norm(dim=1)
        # a packed row may choose another expert where two are nearly as likely
        assert float(apart.median() if packed else apart.max()) < (1e-2 if packed else 1e-4)
    assert ours.weights.packed == (stored != "some floating")


def test_weights_that_make_keys_and_values_are_not_rounded_at_the_load(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.reference("glm4-moe-lite"), tmp_path)
    config = rounded_config(read_config(tmp_path), "int4", "it")
    weights = load(config, CheckpointWeights(tmp_path, CPU), CPU, dtype=torch.float32)
    plain = Tiny(tmp_path, torch.float32).weights
    assert weights.packed
    for rounded, own in zip(weights.layers, plain.layers, strict=True):
        assert rounded.kv is not None and own.kv is not None
        assert torch.equal(rounded.kv, own.kv)


def test_a_layer_after_the_last_one_is_neither_loaded_nor_counted(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.reference("glm4-moe-lite"), tmp_path, "1GB")
    path, config, said = tmp_path / "model.safetensors", read_config(tmp_path), list[str]()
    counted = weights_bytes(config, [read_safetensors(path)])
    held = safetensors.torch.load_file(path)
    held["model.layers.3.eh_proj.weight"] = torch.zeros(100, 100)
    held["model.layers.2.stray.weight"] = torch.zeros(1)
    safetensors.torch.save_file(held, path)
    assert weights_bytes(config, [read_safetensors(path)]) == counted + 4
    source = CheckpointWeights(tmp_path, CPU)
    load(config, source, CPU, notify=said.append)
    [note] = said
    assert "layers.2.stray" in note and "more" not in note


# ---------------------------------------------------------------------------- plan


@pytest.mark.parametrize(("raw", "layers"), [(LITE, 27), (FLASH, 47)])
def test_a_token_takes_one_latent_and_one_rotated_key_a_layer(
    raw: dict[str, Any], layers: int
) -> None:
    config = parse_config(raw, "it")
    assert kv_token_bytes(config) == layers * (512 + 64) * 2
    found = plan(config, (), LoadOptions(max_slots=2, dummy_weights=True), gpu(140 * GB))
    assert found.fits and found.kv_bytes == 2 * config.context_train * layers * 576 * 2


def test_an_8_bit_cache_is_refused_and_never_advised() -> None:
    config = parse_config(FLASH, "it")
    assert kv_types(config) == ("bf16",)
    with pytest.raises(UsageError, match="cannot be fp8") as caught:
        plan(config, (), LoadOptions(kv_type="fp8"), gpu(140 * GB))
    assert "bf16 (one latent for all heads)" in str(caught.value.hint)
    tight = plan(config, (), LoadOptions(max_slots=4, dummy_weights=True), gpu(70 * GB))
    assert tight.fits and tight.context_tokens < config.context_train
    assert not any("FP8" in line for line in (*tight.notes, *tight.advice))


def test_what_makes_keys_and_values_counts_in_16_bits_where_it_is_stored_in_4() -> None:
    config = parse_config({**FLASH, "quantization_config": AWQ}, "it")
    name = "model.layers.0.self_attn.kv_b_proj"
    stored = [
        Tensor(f"{name}.qweight", (512, 20 * 448 // 8), "I32", 0, 512 * 20 * 448 // 2),
        Tensor(f"{name}.scales", (4, 20 * 448), "F16", 0, 8 * 20 * 448),
    ]
    header = SafetensorsHeader("m", {}, tuple(stored), 0)
    assert weights_bytes(config, [header]) == 47 * 20 * 448 * 512 * 2


def test_dense_layers_are_counted_as_such() -> None:
    config = parse_config(LITE, "it")
    # 2.4 of 15.7 billion weights and the embedding's rows, which token_bytes counts whole
    assert 0.16 < token_bytes(config, 1_000_000) / 1_000_000 < 0.18
    packed = parse_config({**LITE, "quantization_config": {**AWQ, "group_size": 32}}, "it")
    attention = 2048 * (16 * 192 + 576) + 2048 * 16 * 128
    # The down projection reads 10,944 columns, which are padded to a multiple of 128.
    dense = 2048 * (2 * 10944 + 11008)
    assert unpacked_bytes(packed) == 2 * (27 * attention + dense)


# ---------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("raw", "change", "words"),
    [
        (LITE, {"kv_lora_rank": 384}, "latents of 384 columns"),
        (LITE, {"qk_rope_head_dim": 48}, "rotated keys of 48 columns"),
        (LITE, {"scoring_func": "sigmoid"}, "weighed by sigmoid"),
        (LITE, {"norm_topk_prob": True}, "add up to 1"),
        (LITE, {"moe_layer_freq": 2}, "some of the layers"),
        (LITE, {"first_k_dense_replace": None}, "first_k_dense_replace is None"),
        (LITE, {"attention_bias": True}, "biases in the attention"),
        (FLASH, {"n_group": 8, "topk_group": 4}, "from some groups"),
        (FLASH, {"mlp_layer_types": ["dense"]}, "mlp_layer_types is not a list of 47"),
        (FLASH, {"partial_rotary_factor": 0.5}, "rotations of 32 of 64 columns"),
        (FLASH, {"quantization_config": {"quant_method": "fp8"}}, "experts quantized as FP8"),
    ],
)
def test_forms_without_a_kernel_are_refused(
    raw: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelInvalid, match=words):
        parse_config(json.loads(json.dumps({**raw, **change})), "it")


def test_groups_of_which_all_are_taken_are_no_groups() -> None:
    whole = {**LITE, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 4}
    assert parse_config(whole, "it") == parse_config(LITE, "it")
