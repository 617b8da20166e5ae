"""From a path to an opened model to a runner: what is refused, what is said, what is light."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import gguf
import numpy as np
import pytest

from localchat.backend_api.interface import Backend, LoadRequest, OpenModel
from localchat.errors import DoesNotFit, EngineClosed, LocalchatError, ModelInvalid, ModelMissing
from localchat.fit.load_options import LoadOptions
from localchat_llamacpp import LlamaCppBackend, build_advice
from localchat_llamacpp.library_source import find_library
from localchat_llamacpp.model import GgufModel
from tests.support.llamacpp_driver import Driver, plan_of
from tests.support.llamacpp_models import (
    CONTROL,
    HEAD,
    LAYERS,
    TEMPLATE,
    TRAINED,
    VOCAB,
    write_bert,
)

OPTIONS = LoadRequest(plan_of(512, 64), LoadOptions(threads=1, max_slots=4), safe_mode=True)


def _silent(_sentence: str) -> None:
    return None


def _open(path: Path) -> GgufModel:
    backend: Backend = LlamaCppBackend()
    opened: OpenModel = backend.open(path, _silent)
    return cast(GgufModel, opened)


def test_looking_for_the_backend_loads_nothing_heavy() -> None:
    code = (
        "import sys; from localchat_llamacpp import LlamaCppBackend;"
        "print(LlamaCppBackend().available());"
        "print([m for m in ('llama_cpp', 'xllamacpp', 'numpy', 'torch', 'gguf') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    answer, heavy = done.stdout.splitlines()
    assert "ok=True" in answer
    assert find_library().library is not None
    assert heavy == "[]"


def test_a_build_is_named_by_its_files_and_the_cpu(tmp_path: Path) -> None:
    key = LlamaCppBackend().build_key()
    assert key == LlamaCppBackend().build_key() != ""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        "model name : other\nflags : amx_int8\n\nprocessor : 1\n"
    )
    assert build_advice.build_key(tmp_path) != key


def test_a_machine_without_llama_cpp_is_told_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delenv("LOCALCHAT_LLAMACPP_LIBRARY", raising=False)
    answer = LlamaCppBackend().available()
    assert (answer.ok, answer.reason) == (False, "llama.cpp is not installed.")
    assert "pip install llama-cpp-python" in answer.hint


def test_files_are_accepted_by_their_first_bytes_or_their_name(
    models: dict[str, Path], tmp_path: Path
) -> None:
    backend = LlamaCppBackend()
    renamed = tmp_path / "model.bin"
    renamed.write_bytes(models["llama"].read_bytes())
    (tmp_path / "text.bin").write_text("hello")
    assert backend.accepts(renamed)
    assert backend.accepts(tmp_path / "missing.gguf")
    assert not backend.accepts(tmp_path / "text.bin")
    assert not backend.accepts(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert not backend.accepts(tmp_path / "pipe")
    assert not backend.accepts(tmp_path / "missing")


def test_an_open_model_says_what_the_file_says(models: dict[str, Path]) -> None:
    model = _open(models["llama"])
    info = model.info
    assert (info.name, info.architecture, info.quantization) == ("tiny-llama", "llama", "F32")
    assert (info.context_train, info.vocab_size, info.chat_template) == (TRAINED, VOCAB, TEMPLATE)
    assert info.file_bytes == models["llama"].stat().st_size
    assert info.parameters > 100_000
    assert model.tokenizer.encode("hello")
    model.close()
    model.close()


def test_the_files_own_sampling_defaults_are_told(tmp_path: Path, models: dict[str, Path]) -> None:
    path = _rewritten(models["llama"], tmp_path / "a.gguf", temp=0.5, top_k=20)
    model = _open(path)
    assert dict(model.info.sampling) == {"temperature": 0.5, "top_k": 20.0}
    model.close()


def test_other_weights_under_the_same_header_are_another_model(
    tmp_path: Path, models: dict[str, Path]
) -> None:
    data = bytearray(models["llama"].read_bytes())
    same, other = tmp_path / "same.gguf", tmp_path / "other.gguf"
    same.write_bytes(data)
    data[-100:] = bytes(100)
    other.write_bytes(data)
    names = []
    for path in (models["llama"], same, other):
        model = _open(path)
        names.append(model.info.identity)
        model.close()
    assert names[0] == names[1] != names[2]


def test_a_loaded_model_answers(models: dict[str, Path]) -> None:
    told: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> bool:
        told.append((done, total))
        return True

    model = _open(models["llama"])
    runner = model.load(OPTIONS, progress, _silent)
    size = models["llama"].stat().st_size
    assert told[-1] == (size, size)
    assert runner.capabilities.context_tokens == 512
    assert set(runner.capabilities.kv_types) >= {"f16", "q8_0", "q4_0"}
    # Cells of 2 layers, keys and values of one head each, 2 bytes; the library rounds its report.
    assert runner.capabilities.bytes_per_token == pytest.approx(2 * LAYERS * HEAD * 2, rel=0.05)
    assert Driver(runner).prefill(model.tokenizer.encode("hello world")).samples
    runner.close()
    model.close()


def test_the_plan_is_made_from_the_header_and_can_be_loaded(models: dict[str, Path]) -> None:
    model = _open(models["gemma3"])
    plan = model.plan(LoadOptions(max_slots=3))
    assert plan.fits
    assert plan.context_tokens == TRAINED
    runner = model.load(
        LoadRequest(plan, LoadOptions(threads=1, max_slots=3), safe_mode=True),
        lambda *_: True,
        _silent,
    )
    assert runner.capabilities.context_tokens == TRAINED
    assert runner.capabilities.max_slots == 3
    took = runner.memory()
    assert took.kv_bytes == pytest.approx(plan.kv_bytes, rel=0.05)
    runner.close()
    model.close()


def test_a_plan_that_does_not_fit_is_an_error_with_both_numbers(models: dict[str, Path]) -> None:
    model = _open(models["llama"])
    with pytest.raises(DoesNotFit) as caught:
        model.plan(LoadOptions(context_tokens=4096, kv_limit_bytes=1))
    assert caught.value.hint
    model.close()


def test_a_load_can_be_stopped_and_an_exception_of_the_listener_is_not_lost(
    models: dict[str, Path],
) -> None:
    model = _open(models["llama"])
    with pytest.raises(EngineClosed):
        model.load(OPTIONS, lambda done, total: False, _silent)

    def broken(done: int, total: int) -> bool:
        raise BrokenPipeError("nobody listens")

    with pytest.raises(EngineClosed) as caught:
        model.load(OPTIONS, broken, _silent)
    assert isinstance(caught.value.__cause__, BrokenPipeError)
    model.load(OPTIONS, lambda done, total: True, _silent).close()
    model.close()


def test_a_context_that_cannot_be_made_is_an_error_with_the_librarys_reason(
    models: dict[str, Path],
) -> None:
    model = _open(models["llama"])
    # A quantized cache needs flash attention.
    options = OPTIONS._replace(plan=plan_of(512, 64, "q4_0", flash=False))
    with pytest.raises(DoesNotFit, match=r"q4_0 KV.*could not be allocated: \S"):
        model.load(options, lambda done, total: True, _silent)
    with pytest.raises(ModelInvalid, match="expected one of"):
        model.load(OPTIONS._replace(plan=plan_of(512, 64, "q3_z")), lambda *_: True, _silent)
    model.close()


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _unknown_architecture(data: bytes) -> bytes:
    return data.replace(b"llama", b"lxama")


def _missing_tensor(data: bytes) -> bytes:
    return data.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xp.weight")


@pytest.mark.parametrize(
    "damage",
    [
        _cut,
        _unknown_architecture,
        lambda data: b"",
        lambda data: b"GGUF",
        lambda data: b"just a text\n" * 100,
        lambda data: data[:4] + b"\xff" * 40 + data[44:],
        lambda data: data[:-4000],
    ],
    ids=["half", "architecture", "empty", "magic", "text", "counts", "tail"],
)
def test_a_damaged_file_is_refused_before_the_load(
    damage: Callable[[bytes], bytes], tmp_path: Path, models: dict[str, Path]
) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damage(models["llama"].read_bytes()))
    with pytest.raises(ModelInvalid) as caught:
        _open(path)
    assert "damaged.gguf" in caught.value.message


def test_missing_tensors_are_told_by_name_when_the_weights_are_read(
    tmp_path: Path, models: dict[str, Path]
) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(_missing_tensor(models["llama"].read_bytes()))
    with pytest.raises(ModelInvalid, match=r"blk\.1\.ffn_up\.weight"):
        _open(path).load(OPTIONS, lambda done, total: True, _silent)


def test_a_missing_file_and_a_folder_have_their_own_words(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing):
        _open(tmp_path / "missing.gguf")
    with pytest.raises(LocalchatError, match=str(tmp_path)):
        _open(tmp_path)


def test_a_model_with_an_encoder_is_refused_in_a_sentence(
    tmp_path: Path, models: dict[str, Path]
) -> None:
    path = _rewritten(models["llama"], tmp_path / "t5.gguf", architecture="t5")
    with pytest.raises(ModelInvalid, match="decoder-only"):
        _open(path)


def test_an_embedding_model_is_refused_at_the_load(tmp_path: Path, models: dict[str, Path]) -> None:
    model = _open(write_bert(tmp_path / "bert.gguf"))
    with pytest.raises(ModelInvalid, match="embedding model"):
        model.load(OPTIONS, lambda done, total: True, _silent)


def test_a_split_model_is_loaded_from_any_of_its_parts(
    tmp_path: Path, models: dict[str, Path]
) -> None:
    _rewritten(models["llama"], tmp_path / "split.gguf", parts=3)
    parts = sorted(tmp_path.glob("split-*.gguf"))
    assert len(parts) == 3
    whole, model = _open(models["llama"]), _open(parts[1])
    assert model.info.parameters == whole.info.parameters
    answers = []
    for opened in (whole, model):
        runner = opened.load(OPTIONS, lambda done, total: True, _silent)
        driver = Driver(runner)
        answers.append([driver.prefill([1, 2, 3]).samples[0].token, *driver.go_on(3, 5)])
        runner.close()
        opened.close()
    assert answers[0] == answers[1]


def test_a_file_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "clip.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_head_count(1)
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelInvalid, match="vocabulary"):
        _open(tmp_path / "clip.gguf")


def test_control_words_are_those_of_the_file(models: dict[str, Path]) -> None:
    model = _open(models["llama"])
    assert model.tokenizer.piece(model.tokenizer.bos, special=True) == CONTROL[0].encode()
    model.close()


def _rewritten(
    source: Path, path: Path, *, architecture: str = "llama", parts: int = 1, **sampling: float
) -> Path:
    """A copy under another architecture, in parts, or with `general.sampling` keys."""
    reader = gguf.GGUFReader(source)
    tensors = -(-len(reader.tensors) // parts) if parts > 1 else 0
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors)
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            name = field.name.replace("llama.", f"{architecture}.")
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    for name, value in sampling.items():
        add = writer.add_int32 if isinstance(value, int) else writer.add_float32
        add(f"general.sampling.{name}", value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
