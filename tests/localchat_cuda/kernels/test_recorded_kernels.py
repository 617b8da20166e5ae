"""Compiled kernels are recorded, so that only those that changed are compiled again."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.compiled_kernels import RECORDS, KernelCompiler, inputs_of

SCRIPT = """
import pathlib, sys
path = pathlib.Path(sys.argv[1])
path.write_text(path.read_text() + "x")
print(len(path.read_text()))
"""
"""Its result is how often it ran."""


@pytest.fixture
def compiler(tmp_path: Path) -> KernelCompiler:
    return KernelCompiler(tmp_path / "cache", record=True, records=tmp_path / "records")


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    path = tmp_path / "runs"
    path.write_text("")
    return path


def test_a_script_with_recorded_inputs_does_not_run(compiler: KernelCompiler, runs: Path) -> None:
    assert compiler.results("a", SCRIPT, str(runs)) == 1
    assert compiler.results("a", SCRIPT, str(runs)) == 1
    assert compiler.results("a", SCRIPT + "# changed", str(runs)) == 2


def test_nothing_is_recorded_unless_it_is_asked_for(compiler: KernelCompiler, runs: Path) -> None:
    plain = replace(compiler, record=False)
    assert [plain.results("a", SCRIPT, str(runs)) for _ in range(2)] == [1, 2]
    assert not compiler.records.exists()


def test_a_change_of_an_imported_module_is_another_input(tmp_path: Path) -> None:
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    (kernels / "__init__.py").write_text("")
    (kernels / "gemm.py").write_text("from kernels.tiles import ROWS\n")
    (kernels / "tiles.py").write_text("ROWS = 16\n")
    (kernels / "other.py").write_text("")

    def inputs() -> str:
        return inputs_of("from kernels import gemm", (), (tmp_path,))

    before = inputs()
    (kernels / "other.py").write_text("ROWS = 8\n")
    assert inputs() == before
    (kernels / "tiles.py").write_text("ROWS = 32\n")
    assert inputs() != before
    assert inputs_of("from kernels import gemm", ("90",), (tmp_path,)) != inputs()


def test_every_record_has_inputs_and_results() -> None:
    records = [json.loads(path.read_text(encoding="utf-8")) for path in RECORDS.glob("*.json")]
    assert len(records) == 13
    assert all(record["results"] and len(record["inputs"]) == 64 for record in records)
