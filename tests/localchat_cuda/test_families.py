"""Windows, post-norms, merged products and parts that are left out, from a checkpoint to the text."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from localchat.model_files.safetensors import read_safetensors
from localchat_cuda.checkpoint_model import CheckpointModel
from localchat_cuda.config.reader import read_config
from localchat_cuda.plan import weight_sizes
from localchat_cuda.weights.loader import load
from localchat_cuda.weights.source import CheckpointWeights
from tests.support import tiny_models
from tests.support.hub_configs import CONFIGS
from tests.support.speaking_checkpoint import write_speaking
from tests.support.tiny_engine_core import ON_GPU, TinyLoop, request, tiny_runner
from tests.support.tiny_models import KINDS, VOCABULARY, Stretch, Tiny, tokens_of

NEWER = (
    *("mistral", "qwen2-window", "gemma2", "gemma3", "phi3-long", "qwen3-yarn"),
    *("mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss"),
    *("ministral", "seed-oss", "glm4", "granite", "smollm3"),
    *("olmo3", "granite4-moe", "gemma4-small", "gemma4-moe"),
    *("deepseek-v2", "glm4-moe-lite"),
    *("lfm2", "lfm2-moe", "granite4-h", "granite4-h-moe", "nemotron-h", "nemotron-h-moe"),
)
SMALL_GEMMA4 = {
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_kv_shared_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "attention_k_eq_v": True,
}
TWO_LAYERS = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0,
}


def compute_logits(model: Any, tokens: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return found


def lost(model: Any, prompt: tuple[int, ...], found: list[int]) -> float:
    """By how much a drawn token was worse than the best one, at most, as a logit.

    All tokens are computed at once. The model's own text would take a step for each.
    """
    logits = compute_logits(model, (*prompt, *found))[len(prompt) - 1 : -1]
    own = logits.gather(1, torch.tensor(found)[:, None])[:, 0]
    return float((logits.max(1).values - own).max())


@pytest.mark.parametrize("kind", NEWER)
def test_drafts_chunks_and_neighbours_leave_the_text_of_transformers(
    kind: str, tmp_path: Path
) -> None:
    """Prompts longer than the window in chunks beside others that decode, and drafts of repeated text."""
    model = tiny_models.reference(kind)
    tiny_models.save(model, tmp_path)
    loop = TinyLoop(tiny_runner(tmp_path, step=24))
    prompts = [tokens_of(20, 9) * 7, tokens_of(21, 50), tokens_of(22, 70)]
    ids = [
        loop.ask(request(prompt, max_tokens=32, speculation=i == 0))
        for i, prompt in enumerate(prompts)
    ]
    loop.run_until_idle()
    for id_, prompt in zip(ids, prompts, strict=True):
        found = loop.received[id_].tokens()
        # Two tokens may be equally likely to within rounding.
        near = 0.2 if ON_GPU else 1e-4
        assert len(found) == 32
        assert lost(model, prompt, found) < near


def test_mxfp4_experts_leave_the_text_of_transformers(tmp_path: Path) -> None:
    model, prompt = tiny_models.reference("gpt-oss"), tokens_of(29, 50)
    tiny_models.save_mxfp4(model, tmp_path)
    found = TinyLoop(tiny_runner(tmp_path, step=24)).say(request(prompt, max_tokens=64)).tokens()
    assert len(found) == 64
    # In fp16 another expert may be chosen: torch's own logprobs then differ by up to 1.5 from those in fp32.
    assert lost(model, prompt, found) < (0.3 if ON_GPU else 1e-4)


@pytest.mark.parametrize("kind", ["gemma3", "mistral"])
def test_prompt_logprobs_are_transformers(kind: str, tmp_path: Path) -> None:
    model, tokens = tiny_models.reference(kind), tokens_of(23, 100)
    tiny_models.save(model, tmp_path)
    asked = request(tokens, prompt_logprobs=0, max_tokens=1)
    told = TinyLoop(tiny_runner(tmp_path, step=32)).say(asked)
    logs = compute_logits(model, tokens).log_softmax(-1)[:-1]
    wanted = logs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    found = torch.tensor([entry.logprob for entry in told.prompt_logprobs])
    apart = (found - wanted).abs()
    # In fp16 the least likely tokens of these random models, e^-20, are off by more than the others.
    assert float((apart / wanted.abs().clamp(min=1)).max()) < (0.03 if ON_GPU else 2e-3)


def test_windows_wider_than_the_context_keep_their_own_rotation(
    tmp_path: Path,
) -> None:
    model, tokens = tiny_models.reference("gemma3", sliding_window=4096), tokens_of(26, 40)
    tiny_models.save(model, tmp_path)
    found = Tiny(tmp_path, torch.float32).prompt(tokens, 40)
    assert torch.allclose(found, compute_logits(model, tokens), atol=2e-3, rtol=1e-4)


def test_only_gemma_2_caps_its_attention(tmp_path: Path) -> None:
    caps = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}
    model, tokens = tiny_models.reference("gemma3", **caps), tokens_of(27, 40)
    tiny_models.save(model, tmp_path)
    found = Tiny(tmp_path, torch.float32).prompt(tokens, 40)
    assert torch.allclose(found, compute_logits(model, tokens), atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("kind", ["mistral", "gemma3", "gemma4-small", "olmo3"])
def test_quantized_layers_serve_windows_drafts_and_batches(kind: str, tmp_path: Path) -> None:
    model = tiny_models.reference(kind)
    tiny_models.save_awq(model, tmp_path)
    prompts = [tokens_of(24, 9) * 5, tokens_of(25, 60)]
    loop = TinyLoop(tiny_runner(tmp_path, step=40))
    ids = [loop.ask(request(prompt, max_tokens=32, speculation=True)) for prompt in prompts]
    loop.run_until_idle()
    for id_, prompt in zip(ids, prompts, strict=True):
        found = loop.received[id_].tokens()
        # activations are rounded to 16 bits a group, so a text may part where two tokens are as good
        assert lost(model, prompt, found) < 0.1
        assert len(found) == 32


@pytest.mark.skipif(ON_GPU, reason="for the interpreter")
@pytest.mark.parametrize(
    ("kind", "chunk", "shape"),
    [
        *(("gemma3", 9, {}), ("phi3-long", 17, {})),
        ("olmo2", 9, {"num_hidden_layers": 1, "intermediate_size": 128}),
        *(
            ("deepseek-v2", 3, {"num_hidden_layers": 2}),
            ("glm4-moe-lite", 9, {"num_hidden_layers": 2}),
        ),
        ("gemma4-small", 9, {**SMALL_GEMMA4, **TWO_LAYERS}),
    ],
)
def test_kernels_of_packed_weights_match_transformers(
    kind: str, chunk: int, shape: dict[str, Any], tmp_path: Path
) -> None:
    model, tokens = tiny_models.reference(kind, **shape), tokens_of(8, chunk)
    tiny_models.save_awq(model, tmp_path)
    found = Tiny(tmp_path, torch.float16, kernels=True).prompt(tokens, chunk, packed=True)
    wanted = compute_logits(model, tokens)
    assert float((found - wanted).norm() / wanted.norm()) < 2e-2


@pytest.mark.skipif(ON_GPU, reason="for the interpreter")
@pytest.mark.parametrize("mxfp4", [False, True])
def test_kernels_of_gpt_oss_match_transformers(mxfp4: bool, tmp_path: Path) -> None:
    """A prompt chunk longer than the window, whose rows are sorted by expert, and then few rows."""
    model, tokens = tiny_models.reference("gpt-oss"), tokens_of(10, 30)
    (tiny_models.save_mxfp4 if mxfp4 else tiny_models.save)(model, tmp_path)
    ours = Tiny(tmp_path, torch.float16, kernels=True)
    ours.step(Stretch(0, 0, tokens[:29]))
    found = ours.step(Stretch(0, 29, tokens[29:]), Stretch(1, 0, tokens[:3]))
    wanted = compute_logits(model, tokens)[[29, 2]]
    assert float((found - wanted).norm() / wanted.norm()) < 2e-2


@pytest.mark.skipif(ON_GPU, reason="for the interpreter")
@pytest.mark.parametrize(
    ("kind", "count", "shape"),
    [
        *(("gemma3", 30, {}), ("phi3-long", 30, {})),
        ("olmo3", 8, {"hidden_size": 64, "intermediate_size": 64, "sliding_window": 4}),
        (
            "granite4-moe",
            10,
            {"hidden_size": 64, "intermediate_size": 32, "shared_intermediate_size": 64},
        ),
        ("gemma4-small", 8, {**SMALL_GEMMA4, "hidden_size": 64, "sliding_window": 4}),
        ("gemma4-moe", 10, {**SMALL_GEMMA4, **TWO_LAYERS, "hidden_size": 64}),
        *(("deepseek-v2", 10, {}), ("glm4-moe-lite", 35, {})),
        *(("lfm2", 20, {}), ("granite4-h", 70, {}), ("nemotron-h-moe", 20, {})),
    ],
)
def test_kernels_of_dense_weights_match_transformers(
    kind: str, count: int, shape: dict[str, Any], tmp_path: Path
) -> None:
    """A prompt chunk longer than the window and, in the next step, one token and a short chunk."""
    model, tokens = tiny_models.reference(kind, **shape), tokens_of(9, count)
    tiny_models.save(model, tmp_path)
    ours, last = Tiny(tmp_path, torch.float16, kernels=True), count - 1
    ours.step(Stretch(0, 0, tokens[:last]))
    found = ours.step(Stretch(0, last, tokens[last:]), Stretch(1, 0, tokens[:3]))
    wanted = compute_logits(model, tokens)[[last, 2]]
    assert float((found - wanted).norm() / wanted.norm()) < 2e-2


@pytest.mark.parametrize(
    ("kind", "prefix"),
    [
        ("gemma3", "language_model.model."),
        ("gemma3", "model.language_model."),
    ],
)
def test_the_text_part_of_a_model_that_sees_is_loaded_alone(
    kind: str, prefix: str, tmp_path: Path
) -> None:
    model = tiny_models.reference(kind)
    held = {
        name.replace("model.", prefix, 1): tensor.clone()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    text_bytes = 2 * sum(tensor.numel() for tensor in held.values())
    begin = "model." if prefix.startswith("model.") else ""
    held[f"{begin}vision_tower.weight"] = torch.zeros(1000, 1000)
    held[f"{begin}multi_modal_projector.weight"] = torch.zeros(100)
    held[f"{begin}audio_tower.conformer.0.weight"] = torch.zeros(100)
    safetensors.torch.save_file(held, tmp_path / "model.safetensors")
    text = model.config.to_dict()
    raw = {
        "architectures": [f"{KINDS[kind][0]}ForConditionalGeneration"],
        "dtype": "bfloat16",
        "eos_token_id": [1, 106],
        "text_config": {**text, "architectures": None, "eos_token_id": 1},
        "vision_config": {"hidden_size": 8, "num_hidden_layers": 3},
    }
    (tmp_path / "config.json").write_text(json.dumps(raw, default=str))
    config, tokens = read_config(tmp_path), tokens_of(1, 40)
    assert config.vision
    header = read_safetensors(tmp_path / "model.safetensors")
    assert weight_sizes.weights_bytes(config, [header]) == text_bytes
    found = Tiny(tmp_path, torch.float32).prompt(tokens, 40)
    assert torch.allclose(found, compute_logits(model, tokens), atol=2e-3, rtol=1e-4)


def test_keys_that_a_gemma_4_shares_are_not_reported_as_unread(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.reference("gemma4-small"), tmp_path, "1GB")
    held = safetensors.torch.load_file(tmp_path / "model.safetensors")
    config, said = read_config(tmp_path), list[str]()
    for layer, count in ((4, 0), (0, 1)):
        held[f"model.layers.{layer}.self_attn.v_proj.scale"] = torch.zeros(1)
        safetensors.torch.save_file(held, tmp_path / "model.safetensors")
        source = CheckpointWeights(tmp_path, tiny_models.CPU)
        load(config, source, tiny_models.CPU, notify=said.append)
        assert len(said) == count
    assert "layers.0.self_attn.v_proj.scale" in said[0]


@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Qwen3VL"])
def test_text_of_qwen_models_that_see_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    rotation = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
    text = {**tiny_models.SHAPE, **tiny_models.NARROW, "rope_parameters": rotation}
    del text["rope_theta"], text["head_dim"]
    if family == "Qwen3VL":
        text["head_dim"] = 64
    seen = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    config = getattr(transformers, f"{family}Config")(
        text_config=text, vision_config={**seen, "out_hidden_size": 128}, tie_word_embeddings=False
    )
    torch.manual_seed(3)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    tiny_models.save(model, tmp_path)
    tokens = tokens_of(29, 40)
    assert read_config(tmp_path).vision
    found = Tiny(tmp_path, torch.float32).prompt(tokens, 13)
    assert torch.allclose(found, compute_logits(model, tokens), atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_random_weights_are_as_many_as_the_plan_counts(kind: str, tmp_path: Path) -> None:
    model = tiny_models.reference(kind)
    tiny_models.save(model, tmp_path)
    config = read_config(tmp_path)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert weight_sizes.parameters(config) == counted
    packed = replace(config, dtype="bfloat16")
    assert weight_sizes.dummy_bytes(packed) == 2 * counted


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_unloaded_parts_and_changed_dtypes_are_reported(device: str, tmp_path: Path) -> None:
    write_speaking(tmp_path)
    raw = {**CONFIGS["gemma3:4b"][0], "torch_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    said: list[str] = []
    model = CheckpointModel(tmp_path, device, said.append)
    assert [line.split(":")[0] for line in said] == [
        "Numbers in this model exceed the range of fp16, in which it is stored. It runs in bf16.",
        "This model can read images, but only its text part is loaded. Its GGUF version "
        "with a projector (mmproj) reads them, with llama.cpp.",
    ]
    assert model.config.dtype == "bfloat16"
    assert model.info.context_train == 131072


def test_a_token_reads_one_row_of_the_second_embedding(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.reference("gemma4-small"), tmp_path)
    config = read_config(tmp_path)
    rows = 4 * VOCABULARY * 5 * 128
    assert config.float_bytes * weight_sizes.input_rows(config) == rows
    weights = weight_sizes.dummy_bytes(config)
    assert weight_sizes.token_bytes(config, weights) == weights - rows
