"""All that a model family is stands in its module of architectures/."""

import ast
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from localchat_cuda.architectures import ARCHITECTURES, llama
from tests.support import tiny_models
from tests.support.paths import ROOT

PACKAGE = ROOT / "backends" / "localchat_cuda"
NOT_FAMILIES = {
    "__init__",
    "eagle3",
    "family",
    "gemma4_assistant",
    "names",
    "prediction_head",
}
SHARED_WORDS = {"lfm2", "llama", "qwen2"}
"""Also names of tokenizers and of the layer in an EAGLE-3 head."""


def test_each_family_has_a_module_of_its_name_with_a_forward_pass() -> None:
    for name, module in ARCHITECTURES.items():
        assert module.FAMILY.name == name
        assert callable(module.forward)
    modules = {path.stem for path in (PACKAGE / "architectures").glob("*.py")}
    assert modules - ARCHITECTURES.keys() == NOT_FAMILIES


def test_no_module_outside_of_architectures_compares_names_of_families() -> None:
    names = ARCHITECTURES.keys() - SHARED_WORDS
    places = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.value}"
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "architectures"
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert places == []


def test_a_plain_cuda_family_needs_a_module_and_its_name_in_the_list(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny_models.save(tiny_models.reference("llama"), tmp_path)
    tokens = tiny_models.tokens_of(3, 12)
    logits_of_llama = tiny_models.Tiny(tmp_path, torch.float32).prompt(tokens, 12)

    module = ModuleType("localchat_cuda.architectures.plain")
    family = replace(llama.FAMILY, name="plain", classes=("PlainForCausalLM",), gguf=None)
    module.__dict__.update(FAMILY=family, forward=llama.forward)
    monkeypatch.setitem(ARCHITECTURES, "plain", module)
    config = tmp_path / "config.json"
    raw = json.loads(config.read_text()) | {"architectures": ["PlainForCausalLM"]}
    config.write_text(json.dumps(raw))
    plain = tiny_models.Tiny(tmp_path, torch.float32)
    assert plain.config.architecture == "plain"
    assert torch.equal(plain.prompt(tokens, 12), logits_of_llama)
