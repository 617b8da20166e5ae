"""Folders of safetensors as models: shown, listed and taken under a name; and where the layers go."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localchat.fit.hardware import Gpu, Machine
from tests.support.checkpoint_folders import write
from tests.support.cli_program import SCENARIOS
from tests.support.external_stores import gguf
from tests.support.terminal_screen import Call, Outcome

Verb = Callable[..., Outcome]


@pytest.fixture
def models_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The models folder."""
    folder = tmp_path / "models"
    folder.mkdir()
    monkeypatch.setenv("LOCALCHAT_MODELS", str(folder))
    return folder


@pytest.fixture
def verb(call: Call) -> Verb:
    def called(*args: str | Path) -> Outcome:
        return call(SCENARIOS["hello"], *args, named=False)

    return called


def rows(verb: Verb) -> dict[str, Any]:
    return {row["name"]: row for row in json.loads(verb("list", "--json").out)}


def test_show_tells_of_a_checkpoint_as_of_a_gguf(
    verb: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = Machine("x", frozenset(), 2, 8 * 10**9, 6 * 10**9)
    monkeypatch.setattr("localchat.fit.hardware.read_machine", lambda: bare)
    folder = write(tmp_path / "qwen", {"a": ("BF16", (1000, 100), 200_000)})
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ tools }}"}')
    found = json.loads(verb("show", folder, "--json").out)
    assert (found["architecture"], found["quantization"]) == ("Qwen2ForCausalLM", "BF16")
    assert (found["parameters"], found["context_tokens"]) == (100_000, 32768)
    assert found["size_bytes"] == sum(Path(file).stat().st_size for file in found["files"])
    assert found["size_bytes"] > 200_000
    assert found["kv_types"] == ["bf16", "fp8"]
    assert found["cannot"] and "NVIDIA GPU" in found["missing"]
    text = verb("show", folder).out
    assert "100,000" not in text and "0.1 million" in text
    assert "nothing here: the CUDA backend needs an NVIDIA GPU" in text
    assert verb("show", folder, "--template").out == "{{ tools }}\n"
    assert verb("cp", str(folder), "mine").code == 0
    assert rows(verb)["mine"]["quantization"] == "BF16"
    assert rows(verb)["mine"]["size_bytes"] == found["size_bytes"]


def test_show_says_where_the_users_settings_put_the_layers(
    verb: Verb, models_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf(models_dir / "m.gguf")
    card = Gpu(0, "a card", 24 * 10**9, 20 * 10**9)
    here = Machine("x", frozenset(), 2, 32 * 10**9, 30 * 10**9, gpus=(card,))
    monkeypatch.setattr("localchat.fit.hardware.read_machine", lambda: here)
    monkeypatch.setattr("localchat_llamacpp.backend.can_offload", lambda: True)
    assert "all layers on the GPU" in verb("show", "m").out
    monkeypatch.setenv("LOCALCHAT_GPU_LAYERS", "0")
    assert "on the CPU" in verb("show", "m").out
    monkeypatch.setenv("LOCALCHAT_GPU_LAYERS", "some")
    assert verb("show", "m").code == 2


def test_import_of_a_checkpoint_names_the_folder_where_it_lies(
    verb: Verb, models_dir: Path, tmp_path: Path
) -> None:
    folder = write(tmp_path / "qwen", {"a": ("BF16", (1000, 100), 200_000)})
    told = verb("import", folder).err
    assert f"qwen is {folder}, used in place (2" in told
    assert "cannot be run" not in told
    assert rows(verb)["qwen"]["context_tokens"] == 32768
    assert not any(models_dir.iterdir())
    again = verb("import", folder)
    assert again.code == 0 and "imported already" in again.err
    (tmp_path / "b").mkdir()
    other = write(tmp_path / "b" / "qwen", {"a": ("BF16", (1000, 100), 200_000)})
    again = verb("import", other)
    assert again.code == 2 and "there is a model qwen already" in again.err
    assert "used in place" in verb("import", folder, "other").err
    assert verb("rm", "qwen", "--yes").code == 0
    assert (folder / "model.safetensors").is_file()
    assert "qwen" not in rows(verb)
