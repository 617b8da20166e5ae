"""Checkpoints of safetensors become GGUF files that compute what transformers computes."""

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from localchat.errors import LocalchatError, ModelInvalid
from localchat.model_files.open_gguf import read_header
from localchat_llamacpp.convert.checkpoint import CheckpointSource
from localchat_llamacpp.convert.sizes import CheckpointConfig
from localchat_llamacpp.model import GgufModel
from localchat_llamacpp.quantize import GgufQuantizer
from tests.support.llamacpp_core import Core, request
from tests.support.llamacpp_models import BEGIN, END, TEMPLATE, VOCAB
from tests.support.loading import load_model
from tests.support.tiny_checkpoints import SHAPES, logprobs, write_checkpoint

TOKENS = [(7 * place * place + 11 * place) % VOCAB for place in range(60)]


def convert(folder: Path, target: Path, name: str = "F32") -> Path:
    GgufQuantizer().write(folder, target, name, 2, lambda done, total: None)
    return target


@pytest.mark.parametrize("name", SHAPES)
def test_a_converted_checkpoint_computes_what_transformers_computes(
    name: str, tmp_path: Path
) -> None:
    model = write_checkpoint(tmp_path / "in", name)
    path = convert(tmp_path / "in", tmp_path / "out.gguf")
    with load_model(path) as runner:
        received = Core(runner).say(request(TOKENS, max_tokens=1, prompt_logprobs=40))
    expected = logprobs(model, TOKENS)
    worst = 0.0
    for place, entry in enumerate(received.prompt_logprobs):
        for token, _, value in entry.top:
            worst = max(worst, abs(value - float(expected[place, token])))
    # The KV cache is in f16.
    assert worst < 0.03
    assert len(received.prompt_logprobs) == len(TOKENS) - 1


def test_the_vocabulary_and_the_template_come_along(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "in", "qwen3")
    model = GgufModel(convert(tmp_path / "in", tmp_path / "out.gguf", "Q8_0"))
    tokenizer = model.tokenizer
    assert (tokenizer.bos, tokenizer.eos, tokenizer.add_bos) == (BEGIN, END, True)
    assert tokenizer.vocab_size == VOCAB + 4
    assert [tokenizer.piece(token) for token in tokenizer.encode("hello world 42")][:2] == [
        b"hello",
        b" world",
    ]
    assert model.info.chat_template == TEMPLATE
    assert model.info.quantization == "Q8_0"
    model.close()


def test_numbers_of_16_bits_are_copied_unchanged(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    model = write_checkpoint(folder, "qwen2").to(torch.bfloat16)
    model.save_pretrained(folder)
    path = convert(folder, tmp_path / "out.gguf", "BF16")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    stored = model.model.layers[1].mlp.down_proj.weight.detach().view(torch.uint16).numpy()
    assert np.array_equal(tensors["blk.1.ffn_down.weight"].data.view(np.uint16), stored)
    assert tensors["blk.1.attn_norm.weight"].tensor_type.name == "F32"


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "in", "llama")
    source = CheckpointSource(tmp_path / "in")
    largest = max(tensor.size_bytes for tensor in source.header.tensors)
    tracemalloc.start()
    for tensor in source.header.tensors:
        source.stored(tensor)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * largest < source.header.weights_bytes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"hidden_act": "relu"}, "relu"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"num_hidden_layers": 3}, "layer 2 of 3"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
    ],
)
def test_what_llamacpp_would_ignore_is_refused(
    changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    write_checkpoint(folder, "qwen2")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelInvalid, match=expected):
        convert(folder, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_the_short_config_of_gemma_3_gets_the_defaults_of_its_class() -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = CheckpointConfig(
        "gemma", {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    )
    numbers = config.numbers()
    assert (numbers["attention.head_count"], numbers["attention.head_count_kv"]) == (8, 4)
    assert (numbers["attention.key_length"], numbers["rope.freq_base"]) == (256, 1e6)
    assert (numbers["rope.scaling.type"], numbers["rope.scaling.factor"]) == ("linear", 8.0)
    assert config.tied


@pytest.mark.parametrize(
    ("part", "value", "expected"),
    [
        ("model", {"type": "Unigram", "vocab": []}, "Unigram"),
        ("normalizer", {"type": "Lowercase"}, "Lowercase"),
        ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "x+"}}, "x\\+"),
        ("pre_tokenizer", {"type": "Whitespace"}, "Whitespace"),
    ],
)
def test_an_unknown_tokenizer_is_refused(
    part: str, value: object, expected: str, tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    write_checkpoint(folder, "qwen2")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, part: value}))
    with pytest.raises(ModelInvalid, match=expected):
        convert(folder, tmp_path / "out.gguf")


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config.json", {"architectures": 1}),
        ("config.json", {"hidden_size": 10**30}),
        ("config.json", {"quantization_config": "awq"}),
        ("config.json", {"rope_parameters": [1]}),
        ("generation_config.json", {"top_k": float("inf")}),
        ("generation_config.json", {"top_p": 1e308}),
        ("tokenizer.json", {"added_tokens": 3}),
        ("tokenizer.json", {"added_tokens": [{"id": {}, "content": "x"}]}),
        ("tokenizer.json", {"model": {"type": "BPE", "vocab": {"a": "0"}, "merges": []}}),
        ("tokenizer.json", {"model": {"type": "BPE", "vocab": {"a": 0}}}),
        ("tokenizer.json", {"normalizer": 1.5}),
        ("tokenizer_config.json", {"eos_token": [None]}),
        ("tokenizer_config.json", {"chat_template": "\ud800"}),
    ],
)
def test_a_value_of_another_type_is_an_error_with_the_folder(
    file: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    write_checkpoint(folder, "llama")
    path = folder / file
    before = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**before, **changes}))
    with pytest.raises(ModelInvalid, match=re.escape(str(folder))):
        convert(folder, tmp_path / "out.gguf")


def test_a_missing_shard_is_an_error_although_each_layer_has_tensors(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write_checkpoint(folder, "llama")
    (file,) = (
        file
        for file in folder.glob("*.safetensors")
        if "model.layers.1.mlp.down_proj.weight" in load_file(file)
    )
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(ModelInvalid, match=r"layer 1 of 2 has no tensor for ffn_down\.weight"):
        convert(folder, tmp_path / "out.gguf")


def test_a_tensor_in_two_files_and_one_without_elements_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write_checkpoint(folder, "llama")
    (folder / "model.safetensors.index.json").unlink()
    save_file({"model.norm.weight": torch.ones(4)}, folder / "model_extra.safetensors")
    with pytest.raises(ModelInvalid, match="is also in"):
        convert(folder, tmp_path / "out.gguf")
    save_file({"model.extra.weight": torch.ones(4, 0)}, folder / "model_extra.safetensors")
    with pytest.raises(ModelInvalid, match="has the shape"):
        convert(folder, tmp_path / "out.gguf")


def test_a_config_with_too_many_layers_is_refused_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write_checkpoint(folder, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**9}))
    with pytest.raises(ModelInvalid, match="1,000,000,000 layers"):
        convert(folder, tmp_path / "out.gguf")


def test_an_unknown_tensor_and_a_missing_file_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write_checkpoint(folder, "qwen2")
    file = min(folder.glob("*.safetensors"))
    tensors = load_file(file)
    save_file({**tensors, "model.layers.0.surprise.weight": torch.ones(4, 4)}, file)
    with pytest.raises(ModelInvalid, match="surprise"):
        convert(folder, tmp_path / "out.gguf")
    save_file(tensors, file)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(LocalchatError, match=r"tokenizer\.json"):
        convert(folder, tmp_path / "out.gguf")


def test_a_sentencepiece_vocabulary_gets_scores_in_the_order_of_its_merges(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write_checkpoint(folder, "gemma3")
    texts = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "a",
        "b",
        "\u2581",
        "ab",
        "\u2581ab",
    ]
    tokenizer = {
        "added_tokens": [{"id": len(texts), "content": "\u2581\u2581", "special": False}],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": None,
        "model": {
            "type": "BPE",
            "byte_fallback": True,
            "unk_token": "<unk>",
            "vocab": {text: number for number, text in enumerate(texts)},
            "merges": [["a", "b"], ["\u2581", "ab"]],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text("{}")
    path = convert(folder, tmp_path / "out.gguf")
    header = read_header(path)
    assert header.metadata["tokenizer.ggml.model"] == "llama"
    assert header.metadata["tokenizer.ggml.add_space_prefix"] is False
    model = GgufModel(path)
    ids = model.tokenizer.encode("ab ab  é")
    assert ids == [texts.index("ab"), texts.index("\u2581ab"), len(texts), 1 + 0xC3, 1 + 0xA9]
    model.close()
