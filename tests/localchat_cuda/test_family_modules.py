"""All that a model family is stands in its module of architectures/."""

import ast

from localchat_cuda.architectures import ARCHITECTURES
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
