"""A plain model family is a module of architectures/ and one line in the list of modules."""

import ast
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from localchat_cuda.architectures import ARCHITECTURES, llama
from localchat_cuda.config.reader import read_config
from tests.support import tiny_models
from tests.support.paths import ROOT
from tests.support.tiny_models import Tiny, tokens_of

PACKAGE = ROOT / "backends" / "localchat_cuda"
SHARED_WORDS = {"llama", "qwen2"}
"""Also names of tokenizers and of the layer in an EAGLE-3 head."""


def test_a_listed_module_is_all_that_a_plain_family_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = ModuleType("localchat_cuda.architectures.plain")
    module.__dict__.update(
        FAMILY=replace(
            llama.FAMILY, name="plain", classes=("PlainForCausalLM",), label="Plain", gguf=None
        ),
        forward=llama.forward,
    )
    monkeypatch.setitem(ARCHITECTURES, "plain", module)
    tiny_models.save(tiny_models.reference("llama"), tmp_path)
    logits_of_llama = Tiny(tmp_path, torch.float32).prompt(tokens_of(3, 12), 12)
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"architectures": ["PlainForCausalLM"]})
    )
    assert read_config(tmp_path).architecture == "plain"
    logits = Tiny(tmp_path, torch.float32).prompt(tokens_of(3, 12), 12)
    assert torch.equal(logits, logits_of_llama)


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
