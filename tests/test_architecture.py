"""The structure that ARCHITECTURE.md promises: no circles, one meaning a class name, modules named by nouns."""

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import grimp
import pytest

from tests.support.paths import ROOT

PACKAGES = ("localchat", "localchat_llamacpp", "localchat_cuda")
GERUNDS = {"embedding", "onboarding", "pooling", "sampling"}
"""Words of the field or nouns of their own; every other module is named by a plain noun."""


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MAX_PUBLIC_METHODS = 25
MAX_FIELDS = 15
"""A larger class states its reason in a line of its docstring that begins with "Size:"."""


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, cache_dir=None)


def test_no_modules_import_each_other_in_a_circle(graph: grimp.ImportGraph) -> None:
    assert circles(graph.modules, graph.find_modules_directly_imported_by) == []


def test_no_packages_import_each_other_in_a_circle(graph: grimp.ImportGraph) -> None:
    imported: dict[str, set[str]] = defaultdict(set)
    for module in graph.modules:
        for other in graph.find_modules_directly_imported_by(module):
            if package(module) != package(other) and "." in module and "." in other:
                imported[package(module)].add(package(other))
    assert circles(imported, lambda name: imported[name]) == []


def test_a_class_name_stands_once_outside_of_wire_protocols() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sources():
        if path.name == "protocol.py" and "server" in path.parts:
            continue  # named as the API that it describes names them
        for name in re.findall(r"^class (\w+)", path.read_text("utf-8"), re.MULTILINE):
            found[name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_modules_are_named_by_nouns() -> None:
    gerunds = {path.stem.split("_")[-1] for path in sources() if path.stem.endswith("ing")}
    assert gerunds <= GERUNDS


def sources() -> list[Path]:
    """Every module of the product."""
    return [path for name in ("localchat", "backends") for path in (ROOT / name).rglob("*.py")]


def package(module: str) -> str:
    """`localchat.core.kv_cache.slots` -> `localchat.core`; a backend is one package."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "localchat" else parts[0]


def circles(names: Iterable[str], imported: Callable[[str], set[str]]) -> list[list[str]]:
    """Groups of names that reach each other: Tarjan's strongly connected components of more than one."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = lowest[name] = len(index)
        stack.append(name)
        for other in sorted(imported(name)):
            if other not in index:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], index[other])
        if lowest[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in sorted(names):
        if name not in index:
            visit(name)
    return found


def test_a_large_class_states_its_reason() -> None:
    large = []
    for path in sources():
        if path.name == "protocol.py" and "server" in path.parts:
            continue
        code = path.read_text("utf-8")
        # Parsing every module takes seconds, so skip those without enough methods or fields.
        methods = re.findall(r"^ +(?:async )?def [^_]", code, re.MULTILINE)
        annotated = re.findall(r"^ +[\w.]+ *:", code, re.MULTILINE)
        if len(methods) <= MAX_PUBLIC_METHODS and len(annotated) <= MAX_FIELDS:
            continue
        for node in ast.walk(ast.parse(code)):
            if not isinstance(node, ast.ClassDef) or "Size: " in (ast.get_docstring(node) or ""):
                continue
            functions = [part.name for part in node.body if isinstance(part, FUNCTIONS)]
            public = [name for name in functions if not name.startswith("_")]
            fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
            if len(public) > MAX_PUBLIC_METHODS or len(fields) > MAX_FIELDS:
                large.append(f"{path.relative_to(ROOT)}: {node.name}")
    assert large == []
