"""quantize: a GGUF file or a checkpoint, written in another type."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from localchat.config.paths import find_paths
from localchat.model_files.open_gguf import read_header
from tests.support.cli_program import SCENARIOS
from tests.support.llamacpp_models import write_llama
from tests.support.terminal_screen import Call, Outcome
from tests.support.tiny_checkpoints import write_checkpoint

Verb = Callable[..., Outcome]


@pytest.fixture
def models_dir(tmp_path: Path) -> Path:
    """The models folder."""
    folder = find_paths(os.environ).models_dir
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def verb(call: Call) -> Verb:
    def called(*args: str | Path, **how: Any) -> Outcome:
        return call(SCENARIOS["hello"], *args, named=False, **how)

    return called


def test_quantize_writes_a_model_that_runs_by_name(
    verb: Verb, models_dir: Path, tmp_path: Path
) -> None:
    source = write_llama(tmp_path / "tiny-f32.gguf")
    outcome = verb("quantize", source, "--type", "q8_0")
    assert outcome.code == 0, outcome.err
    assert "localchat run tiny-q8_0" in outcome.err
    assert read_header(models_dir / "tiny-q8_0.gguf").quantization == "Q8_0"
    again = verb("quantize", source, "--type", "q8_0")
    assert again.code == 2 and "exists already" in again.err
    unknown = verb("quantize", source, "--type", "q4_k_x")
    assert unknown.code == 2 and "Q4_K_M" in unknown.err


def test_quantize_to_a_folder_or_to_the_same_type_says_what_it_writes(
    verb: Verb, tmp_path: Path
) -> None:
    source = write_llama(tmp_path / "tiny-f32.gguf")
    folder = tmp_path / "new"
    folder.mkdir()
    assert verb("quantize", source, folder, "--type", "q4_1").code == 0
    written = folder / "tiny-q4_1.gguf"
    same = verb("quantize", written, tmp_path / "same.gguf", "--type", "q4_1")
    assert same.code == 0
    assert "is Q4_1 already: the new file has the same weights" in same.err
    tensors = [gguf.GGUFReader(path).tensors for path in (written, tmp_path / "same.gguf")]
    for first, second in zip(*tensors, strict=True):
        assert first.data.tobytes() == second.data.tobytes()


def test_quantize_converts_a_checkpoint_to_the_file_that_is_named(
    verb: Verb, models_dir: Path, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "in", "qwen3")
    target = tmp_path / "out.gguf"
    outcome = verb("quantize", tmp_path / "in", target, "--type", "f16")
    assert outcome.code == 0, outcome.err
    assert f"localchat run {target}" in outcome.err
    assert read_header(target).quantization == "F16"
    twice = verb("quantize", tmp_path / "in", target, "--type", "f16")
    assert twice.code == 2 and "exists already" in twice.err
    (tmp_path / "in" / "tokenizer.json").unlink()
    broken = verb("quantize", tmp_path / "in", tmp_path / "other.gguf", "--type", "f16")
    assert broken.code == 3 and "tokenizer.json" in broken.err
    assert not (tmp_path / "other.gguf").exists()
