"""Report of a real load: memory beside the plan, the reason for the placement, a required GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest, Sampling, TextPrompt
from localchat.errors import DoesNotFit
from localchat.fit.load_options import LoadOptions
from tests.support.gguf_files import F32, Size, write_model

SIZES = {
    "llama": Size(
        layers=4, width=512, heads=8, kv_heads=2, feed_forward=1536, vocab=4000, context=4096
    ),
    "qwen2": Size(
        layers=3, width=768, heads=6, kv_heads=6, feed_forward=1024, vocab=9000, context=2048
    ),
    "gemma3": Size(
        layers=6,
        width=256,
        heads=2,
        kv_heads=1,
        head_width=256,
        vocab=20_000,
        context=4096,
        code=F32,
    ),
}


@pytest.mark.parametrize(
    ("architecture", "kv_type"), [("llama", "f16"), ("qwen2", "q8_0"), ("gemma3", "f16")]
)
def test_a_load_takes_what_was_planned(architecture: str, kv_type: str, tmp_path: Path) -> None:
    size = SIZES[architecture]
    path = write_model(tmp_path / "m.gguf", architecture, size)
    said: list[str] = []
    options = EngineOptions(
        path, load=LoadOptions(kv_type=kv_type, context_tokens=size.context, max_slots=2)
    )
    engine = LocalEngine(options, notify=said.append)
    try:
        with engine.generate(
            GenerateRequest(TextPrompt("a b"), sampling=Sampling(temperature=0), max_tokens=2)
        ) as stream:
            assert list(stream)
        info = engine.info()
    finally:
        engine.close()
    assert info.predicted is not None and info.actual is not None
    # Buffers to the letter; of the process itself a wide guess is enough beside real weights.
    assert info.actual.weights_bytes == pytest.approx(info.predicted.weights_bytes, rel=0.01)
    assert info.actual.kv_bytes == pytest.approx(info.predicted.kv_bytes, rel=0.01)
    # llama.cpp 0.6 keeps up to four activations of a step more, which only a tiny model feels.
    activations = 4 * 128 * size.width * 4
    assert info.actual.compute_bytes == pytest.approx(
        info.predicted.compute_bytes, rel=0.1, abs=activations
    )
    assert info.actual.overhead_bytes == pytest.approx(info.predicted.overhead_bytes, abs=60e6)
    assert info.actual_bytes == sum(
        (
            *(info.actual.weights_bytes, info.actual.kv_bytes),
            *(info.actual.compute_bytes, info.actual.overhead_bytes),
        )
    )
    assert info.free_bytes > info.predicted_bytes
    assert info.why == "A GGUF file runs on llama.cpp, on the CPU."
    assert not any("were planned" in sentence for sentence in said)


def test_a_required_gpu_is_refused_before_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path = write_model(tmp_path / "m.gguf")
    engine = LocalEngine(
        EngineOptions(path, load=LoadOptions(require_gpu=True)), notify=lambda _: None
    )
    try:
        with (
            pytest.raises(DoesNotFit, match="a GPU is required"),
            engine.generate(GenerateRequest(TextPrompt("a"))) as stream,
        ):
            list(stream)
    finally:
        engine.close()


def test_the_command_ends_with_4_where_a_gpu_is_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    path = write_model(tmp_path / "m.gguf")
    done = subprocess.run(
        [sys.executable, "-m", "localchat", "run", "--require-gpu", str(path), "hi"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (4, "")
    assert "tiny llama is not loaded: a GPU is required" in done.stderr


def test_stats_say_the_reason(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "localchat",
            "run",
            "--stats",
            "-q",
            "--max-tokens",
            "2",
            str(path),
            "hi",
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0
    assert done.stderr.splitlines()[-1] == "A GGUF file runs on llama.cpp, on the CPU."
