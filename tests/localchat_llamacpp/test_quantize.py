"""Quantizing: every format is written, read back, as close as its bits allow, and has llama.cpp's blocks."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from localchat.errors import UsageError
from localchat.model_files.open_gguf import read_header
from localchat_llamacpp.quantize import GgufQuantizer
from scripts.tools.check_quantize import compare
from tests.support import llamacpp_models
from tests.support.llamacpp_models import write_llama

# Largest relative error of a Gaussian matrix, by format.
ERRORS = {
    "F16": 0.001,
    "BF16": 0.005,
    "Q8_0": 0.01,
    "Q6_K": 0.03,
    "Q5_K_M": 0.06,
    "Q5_0": 0.06,
    "Q4_K_M": 0.12,
    "Q4_0": 0.12,
    "IQ4_XS": 0.12,
    "Q3_K_M": 0.25,
    "Q2_K": 0.45,
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("source") / "tiny.gguf")


def matrices(path: Path) -> dict[str, np.ndarray]:
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(path).tensors
    }


@pytest.mark.parametrize("name", ERRORS)
def test_weights_come_back_within_the_error_of_the_format(
    name: str, source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out.gguf"
    reports: list[tuple[int, int]] = []
    GgufQuantizer().write(
        source, target, name, 2, lambda done, total: reports.append((done, total))
    )
    before = matrices(source)
    after = matrices(target)
    assert before.keys() == after.keys()
    for tensor, values in before.items():
        size = float(np.linalg.norm(values))
        error = float(np.linalg.norm(after[tensor] - values)) / max(size, 1e-9)
        assert error < ERRORS[name], tensor
    assert reports[-1][0] == reports[-1][1]
    header = read_header(target)
    assert header.quantization == name
    size_bytes = GgufQuantizer().size_bytes(source, name)
    assert header.weights_bytes == size_bytes


@pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python exports the reference"
)
@pytest.mark.parametrize("width", [256, 64], ids=["whole", "odd"])
def test_all_blocks_are_those_of_llama_quantize(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 256 take blocks of K types. Narrower ones need the formats that replace them."""
    sizes = {"EMBED": width, "HEAD": width // 2, "FEED": 2 * width}
    for name, value in sizes.items():
        monkeypatch.setattr(llamacpp_models, name, value)
    source = write_llama(tmp_path / "source.gguf")
    # A process of its own, because two libraries of llama.cpp in one disturb each other.
    names = GgufQuantizer.names
    script = [sys.executable, "-m", "scripts.tools.check_quantize", str(source)]
    options = ["--types", ",".join(names), "--reference", str(tmp_path)]
    subprocess.run([*script, *options], check=True, stderr=subprocess.DEVNULL)
    for name in names:
        target = tmp_path / f"{name}-ours.gguf"
        GgufQuantizer().write(source, target, name, 2, lambda done, total: None)
        comparison = compare(target, tmp_path / f"{name}.gguf")
        assert comparison.blocks > 1000, name
        assert comparison.is_equal, (name, comparison)


def test_everything_but_the_format_is_copied(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.gguf"
    GgufQuantizer().write(source, target, "Q8_0", 1, lambda done, total: None)
    changed = {"general.file_type", "general.quantization_version"}
    before = gguf.GGUFReader(source)
    after = gguf.GGUFReader(target)
    for key, field in before.fields.items():
        if not key.startswith("GGUF.") and key not in changed:
            assert after.fields[key].contents() == field.contents(), key


def test_an_unknown_name_and_an_interrupt_leave_no_file(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.gguf"

    def interrupted(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(UsageError, match="Q9_K"):
        GgufQuantizer().write(source, target, "Q9_K", 1, interrupted)
    with pytest.raises(KeyboardInterrupt):
        GgufQuantizer().write(source, target, "Q4_0", 1, interrupted)
    assert not target.exists()


def test_an_existing_file_is_kept(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.gguf"
    target.write_text("precious")
    with pytest.raises(FileExistsError):
        GgufQuantizer().write(source, target, "Q4_0", 1, lambda done, total: None)
    assert target.read_text() == "precious"
