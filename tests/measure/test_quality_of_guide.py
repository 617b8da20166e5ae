"""Perplexity and divergence on the guide: beside llama.cpp's own logits, and on models that were made worse."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import gguf
import pytest

from localchat.engine.interface import Engine
from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.fit.load_options import LoadOptions
from localchat.measure.comparison import Comparison
from localchat.measure.records import VariantQuality
from localchat.measure.variants import BenchVariant
from localchat.measure.verdict import verdict
from localchat.measure.workload import sample_text
from tests.support.quality_specs import quality_spec

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "localchat" / "guide" / "guide.gguf"
WINDOW, WINDOWS = 256, 4
TEXT = (ROOT / "scripts" / "tools" / "guide" / "topics" / "basics.toml").read_text("utf-8")
# So small a model is very sure of what it says, so that rounding shows: batches of other shapes are half a
# per cent apart here.
CLOSE = 0.02


@pytest.fixture(autouse=True)
def prebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the library that users have: a build of GCC's crashes once with AMX, then takes other kernels."""
    if find_spec("xllamacpp"):
        monkeypatch.setenv("LOCALCHAT_LLAMACPP_LIBRARY", "xllamacpp")


def reference(*arguments: object) -> str:
    program = [sys.executable, "-m", "tests.support.perplexity_reference", *map(str, arguments)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def measured(*models: Path, kv_types: tuple[str, ...] = ("f16",)) -> list[VariantQuality]:
    """The text measured on each model with each KV type."""
    variants = [
        BenchVariant(f"{model.stem} {kv}", str(model), {"kv": kv})
        for model in models
        for kv in kv_types
    ]

    @contextmanager
    def opened(variant: BenchVariant) -> Iterator[Engine]:
        load = LoadOptions(kv_type=variant.settings["kv"], context_tokens=1024, threads=1)
        options = EngineOptions(Path(variant.model), load, backend="llamacpp")
        engine = LocalEngine(options, notify=lambda words: None)
        try:
            yield engine
        finally:
            engine.close()

    spec = quality_spec(variants, ("text",), window_tokens=WINDOW, most_windows=WINDOWS)
    comparison = Comparison(spec, TEXT, (), opened, lambda progress: None)
    comparison.run()
    return comparison.measured


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The guide as Q8_0 and Q2_K."""
    # An import would take the log of the library that other tests of this process use.
    if find_spec("llama_cpp") is None:
        pytest.skip("llama-cpp-python has the reference")
    folder = tmp_path_factory.mktemp("quantized")
    found = {kind: folder / f"{kind}.gguf" for kind in ("q8_0", "q2_k")}
    for kind, path in found.items():
        reference("quantize", GUIDE, path, kind)
    return found


def test_figures_are_those_of_llama_cpp(quantized: dict[str, Path], tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT)
    expected = json.loads(reference("reference", GUIDE, quantized["q2_k"], text, WINDOW, WINDOWS))
    base, other = measured(GUIDE, quantized["q2_k"])
    assert base.perplexity is not None and other.perplexity is not None
    assert other.divergence is not None and other.divergence.complete
    assert base.perplexity.tokens == expected["tokens"] == WINDOWS * (WINDOW // 2 - 1)
    assert base.perplexity.perplexity == pytest.approx(expected["perplexity"], rel=CLOSE)
    assert other.perplexity.perplexity == pytest.approx(expected["other"], rel=CLOSE)
    assert other.divergence.kl_mean == pytest.approx(expected["kl"], rel=CLOSE)
    # Two bits leave many near ties, which the rounding of another CPU's kernels decides otherwise.
    assert other.divergence.same_top_share == pytest.approx(expected["same_top"], abs=0.03)


def test_few_bits_are_told_from_many(quantized: dict[str, Path]) -> None:
    base, many, few = measured(GUIDE, quantized["q8_0"], quantized["q2_k"])
    assert many.divergence is not None and few.divergence is not None
    assert few.divergence.kl_mean > 10 * many.divergence.kl_mean
    assert verdict(base, few).endswith("damaged: do not use it")
    assert "damaged" not in verdict(base, many)


def test_a_model_damaged_in_one_layer_is_found(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    shutil.copyfile(GUIDE, damaged)
    reader = gguf.GGUFReader(damaged, "r+")
    tensor = next(one for one in reader.tensors if one.name == "blk.2.ffn_down.weight")
    tensor.data[:] = tensor.data[::-1].copy()
    reader.data.flush()
    base, same, other = measured(
        GUIDE, tmp_path / shutil.copy(GUIDE, tmp_path / "same.gguf"), damaged
    )
    assert same.divergence is not None and other.divergence is not None
    assert same.divergence.kl_mean == 0.0
    assert verdict(base, same).endswith("safe")
    assert verdict(base, other).endswith("damaged: do not use it")


def test_the_sample_text_is_long_enough_for_several_windows() -> None:
    assert len(sample_text().encode()) > 8_000
