"""Info about a safetensors folder: as much as about a GGUF, from config and headers alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from localchat.models.index import Model, files_of
from localchat.models.info.inspect import Inspection, inspect
from tests.support.checkpoint_folders import write

CARD = "---\nlanguage: en\nlicense: apache-2.0\n---\n# A model\nlicense: another\n"


def seen(folder: Path) -> Inspection:
    return inspect(Model("it", "file", "", folder, files_of(folder)), vocabulary=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "it", {"a": ("BF16", (1000, 100), 200_000)})


def test_a_checkpoint_tells_its_shape(folder: Path) -> None:
    facts = seen(folder).facts
    assert facts is not None
    assert (facts.architecture, facts.layers) == ("Qwen2ForCausalLM", 28)
    assert (facts.parameters, facts.quantization) == (100_000, "BF16")
    assert (facts.context_tokens, facts.vocab_size) == (32768, 152064)
    assert facts.kv_bytes_per_token is None  # `fit` knows the layers
    assert facts.abilities == frozenset() and "plain text" in " ".join(facts.cannot)
    assert facts.license == ""
    (folder / "README.md").write_text(CARD)
    found = seen(folder).facts
    assert found is not None and found.license == "apache-2.0"


@pytest.mark.parametrize(
    ("stated", "codes", "label"),
    [
        ({"quant_method": "awq", "bits": 4}, "a.qweight", "AWQ"),
        ({"quant_method": "gptq", "bits": 8}, "a.qweight", "GPTQ"),
    ],
)
def test_codes_count_as_the_weights_that_they_stand_for(
    tmp_path: Path, stated: dict[str, Any], codes: str, label: str
) -> None:
    tensors = {
        codes: ("I32", (1000, 10), 40_000),
        "a.qzeros": ("I32", (10, 10), 400),
        "a.scales": ("F16", (10, 10), 200),
        "norm": ("F16", (7,), 14),
    }
    facts = seen(write(tmp_path / "q", tensors, quantization_config=stated)).facts
    assert facts is not None
    assert facts.parameters == 10_000 * 32 // stated["bits"] + 7
    assert facts.quantization == label


@pytest.mark.parametrize("where", ["tokenizer_config.json", "chat_template.json", "jinja"])
def test_templates_are_found_wherever_they_stand(folder: Path, where: str) -> None:
    source = "{% if tools %}{{ tools }}{% endif %}<think>"
    if where == "jinja":
        (folder / "tokenizer_config.json").write_text('{"chat_template": "an older one"}')
        (folder / "chat_template.jinja").write_text(source)
    else:
        (folder / where).write_text(json.dumps({"chat_template": source}))
    facts = seen(folder).facts
    assert facts is not None and facts.templates == {"default": source}
    assert facts.abilities == {"chat", "tools", "thinking"}


def test_of_several_templates_the_default_comes_first(folder: Path) -> None:
    stated = [
        {"name": "a", "template": "1"},
        {"name": "default", "template": "2"},
        7,
        {"name": "b"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": stated}))
    facts = seen(folder).facts
    assert facts is not None and list(facts.templates.items()) == [("default", "2"), ("a", "1")]


def test_a_coder_is_known_by_its_tokens(folder: Path) -> None:
    added = {"added_tokens": [{"content": "<|fim_middle|>"}]}
    (folder / "tokenizer.json").write_text(json.dumps(added))
    facts = seen(folder).facts
    assert facts is not None and "infill" in facts.abilities


def test_what_no_backend_runs_and_what_is_broken_is_trouble(folder: Path) -> None:
    assert seen(folder).trouble == ""
    (folder / "tokenizer_config.json").write_text("{")
    assert "is not valid JSON" in seen(folder).trouble
    (folder / "tokenizer_config.json").unlink()
    write(folder, {}, architectures=["NobodysModel"])
    assert "NobodysModel" in seen(folder).trouble
    (folder / "model.safetensors").write_bytes(b"12345678{}")
    assert "not a usable safetensors" in seen(folder).trouble


def test_trouble_names_the_damaged_file_of_the_folder(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(bytes(100))
    assert seen(folder).trouble.startswith("model.safetensors is not a usable safetensors file")


def test_the_files_of_a_checkpoint_are_its_weights_and_settings(folder: Path) -> None:
    for name in ("tokenizer.json", "run.py", "consolidated.safetensors", "README.md"):
        (folder / name).write_text("{}")
    assert {file.name for file in files_of(folder)} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
