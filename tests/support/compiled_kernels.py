"""What compilers make of kernels: recorded, and compiled again once what a script reads has changed."""

import ast
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import triton

from tests.support.paths import ROOT

RECORDS = ROOT / "tests/localchat_cuda/kernels/compiled"
SOURCES = (ROOT, ROOT / "backends")


@dataclass(frozen=True, slots=True)
class KernelCompiler:
    """Runs scripts that compile kernels and print their results as JSON."""

    cache: Path
    """Folder of kernels that earlier runs compiled, for Triton."""
    record: bool = False
    """Write new results to the records."""
    records: Path = RECORDS

    def results(self, name: str, script: str, *arguments: str) -> Any:
        """Return the results of a script: the recorded ones if its inputs are the same."""
        path = self.records / f"{name}.json"
        inputs = inputs_of(script, arguments)
        if path.exists():
            stored = json.loads(path.read_text(encoding="utf-8"))
            if stored["inputs"] == inputs:
                return stored["results"]
        results = self._run(script, arguments)
        if self.record:
            self.records.mkdir(exist_ok=True)
            text = json.dumps({"inputs": inputs, "results": results}, indent=1)
            path.write_text(text + "\n", encoding="utf-8")
        return results

    def _run(self, script: str, arguments: tuple[str, ...]) -> Any:
        environment = {
            **os.environ,
            "TRITON_INTERPRET": "0",
            "TRITON_CACHE_DIR": str(self.cache),
            "TRITON_DEFAULT_FP_FUSION": "1",
            "PYTHONPATH": os.pathsep.join((*map(str, SOURCES), os.environ.get("PYTHONPATH", ""))),
        }
        command = [sys.executable, "-c", script, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])


def inputs_of(script: str, arguments: tuple[str, ...], folders: tuple[Path, ...] = SOURCES) -> str:
    """Return a digest of a script, its arguments, Triton's version and all modules of ours that it imports."""
    digest = hashlib.sha256(repr((triton.__version__, script, arguments)).encode())
    modules, names = set[Path](), set(_imported_names(script))
    while names:
        parts = names.pop().split(".")
        places = [folder.joinpath(*parts) for folder in folders]
        files = [file for at in places for file in (at.with_suffix(".py"), at / "__init__.py")]
        for path in filter(Path.is_file, files):
            if path not in modules:
                modules.add(path)
                names |= _imported_names(path.read_text(encoding="utf-8"))
    for path in sorted(modules):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _imported_names(source: str) -> frozenset[str]:
    """Modules that a source imports, and what may be modules in them."""
    names = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)
