"""The table of quantizations: which one to take on which machine."""

from dataclasses import replace
from pathlib import Path

import pytest

from localchat.cli.models.fit_page import _why_not_finer
from localchat.config.paths import find_paths
from localchat.fit.hardware import Machine
from localchat.fit.load_options import LoadOptions
from localchat.model_files.architecture import ModelShape
from localchat.model_files.checkpoint import read_summary
from localchat.models.assess import Subject
from localchat.models.catalog import read_catalog
from localchat.models.names import parse
from localchat.models.published_shapes import published_model
from localchat.models.quantization_table import QuantizationRow, _recommended, quantization_rows
from tests.support.gguf_files import F16, Size, llama
from tests.support.memory_plans import GB
from tests.support.ram_bandwidth import put_bandwidth

SLOW = 20 * GB
FAST = 400 * GB


def rows(
    name: str, memory_gb: int, bandwidth: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> tuple[QuantizationRow, ...]:
    put_bandwidth(monkeypatch, bandwidth)
    catalog = read_catalog(find_paths({"HOME": str(tmp_path)}))
    shape = published_model(parse(name, catalog))
    assert shape is not None
    machine = Machine("cpu", frozenset({"avx2"}), 8, memory_gb * GB, memory_gb * GB * 7 // 8)
    options = LoadOptions(max_slots=2)
    return quantization_rows(Subject(shape.name, shape), options, machine, None, catalog)


def recommended(table: tuple[QuantizationRow, ...]) -> str:
    return next((row.quantization for row in table if row.recommended), "")


@pytest.mark.parametrize(
    ("name", "memory_gb", "bandwidth", "best"),
    [
        # Too slow to read along: the default, whatever the memory.
        ("qwen2.5:7b", 64, SLOW, "Q4_K_M"),
        # Fast: nobody can tell Q6_K and Q8_0 of a large model apart.
        ("qwen2.5:7b", 64, FAST, "Q6_K"),
        # A small model loses more, and is fast anyway.
        ("qwen2.5:1.5b", 64, FAST, "Q8_0"),
        # Only what fits.
        ("qwen2.5:7b", 8, FAST, "Q5_K_M"),
        # Nothing fits without a large loss.
        ("qwen2.5:14b", 8, FAST, ""),
        # The default where speed is unknown or low, and not the coarsest that is worth it.
        ("qwen3.6:35b-a3b", 64, SLOW, "Q4_K_M"),
        # A large model is still good in 3 bits.
        ("qwen3.6:35b-a3b", 24, FAST, "Q3_K_M"),
    ],
)
def test_the_quantization_follows_memory_and_speed(
    name: str,
    memory_gb: int,
    bandwidth: int,
    best: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    table = rows(name, memory_gb, bandwidth, monkeypatch, tmp_path)
    assert recommended(table) == best


def test_a_row_without_room_for_a_conversation_is_not_recommended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    table = rows("qwen2.5:7b", 64, SLOW, monkeypatch, tmp_path)
    (best,) = (row for row in table if row.recommended)
    assert best.quantization == "Q4_K_M"
    short = best._replace(chat_tokens=best.report.plan.max_context_tokens + 1)
    assert not short.fits_a_chat
    others = [*(row for row in table if row is not best), short]
    assert _recommended(others) is not short
    assert _why_not_finer(short).startswith("Q4_K_M leaves room for 32,768 tokens only")


@pytest.mark.parametrize("free_gb", [23.64, 23.66, 23.7])
def test_a_tight_load_still_gets_the_context_of_a_conversation(
    free_gb: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put_bandwidth(monkeypatch, SLOW)
    catalog = read_catalog(find_paths({"HOME": str(tmp_path)}))
    shape = published_model(parse("qwen3.6:35b-a3b", catalog))
    assert shape is not None
    machine = Machine("cpu", frozenset({"avx2"}), 2, int(25.3 * GB), int(free_gb * GB))
    subject = Subject(shape.name, shape)
    table = quantization_rows(subject, LoadOptions(max_slots=2), machine, None, catalog)
    (best,) = (row for row in table if row.recommended)
    assert best.report.plan.max_context_tokens >= 4096


def test_a_model_with_a_short_context_keeps_its_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put_bandwidth(monkeypatch, SLOW)
    catalog = read_catalog(find_paths({"HOME": str(tmp_path)}))
    shape = published_model(parse("qwen2.5:1.5b", catalog))
    assert isinstance(shape, ModelShape)
    short = replace(shape, context_train=2048, context_scaled=2048)
    machine = Machine("cpu", frozenset({"avx2"}), 8, 64 * GB, 56 * GB)
    options = LoadOptions(max_slots=2)
    table = quantization_rows(Subject(short.name, short), options, machine, None, catalog)
    (row,) = (row for row in table if row.quantization == short.quantization)
    assert row.fits_a_chat


def test_finer_rows_are_larger_slower_and_lose_less(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    table = rows("qwen2.5:7b", 64, FAST, monkeypatch, tmp_path)
    sizes = [row.size_bytes for row in table]
    losses = [row.loss_percent for row in table]
    assert sizes == sorted(sizes, reverse=True)
    assert losses == sorted(losses)
    speeds = [row.speed.tokens_per_s for row in table if row.speed]
    assert speeds == sorted(speeds)
    assert next(row.model for row in table) == "qwen2.5:7b-q8_0"


def test_only_offered_quantizations_are_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    catalog = read_catalog(find_paths({"HOME": str(tmp_path)}))
    table = rows("qwen3.5:9b", 64, FAST, monkeypatch, tmp_path)
    assert [row.model for row in table] == ["qwen3.5:9b-q8_0", "qwen3.5:9b-q4_k_m"]
    for row in rows("qwen3.6:35b-a3b", 24, FAST, monkeypatch, tmp_path):
        source = parse(row.model, catalog)
        assert source.quantization == row.quantization
        entry = catalog["qwen3.6:35b-a3b"]
        assert any(row.quantization in offer.quantizations for offer in entry.sources)


def test_the_repository_says_what_it_offers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put_bandwidth(monkeypatch, FAST)
    catalog = read_catalog(find_paths({"HOME": str(tmp_path)}))
    shape = published_model(parse("qwen2.5:7b", catalog))
    assert shape is not None
    machine = Machine("cpu", frozenset({"avx2"}), 8, 64 * GB, 56 * GB)
    listed = {"Q4_K_M": "hf.co/a/b:Q4_K_M", "Q2_K": "hf.co/a/b:Q2_K"}
    table = quantization_rows(
        Subject("hf.co/a/b:Q4_K_M", shape), LoadOptions(), machine, None, {}, listed
    )
    assert [row.model for row in table] == ["hf.co/a/b:Q4_K_M", "hf.co/a/b:Q2_K"]
    assert recommended(table) == "Q4_K_M"


def test_a_file_of_ones_own_has_the_rows_that_quantize_can_make(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put_bandwidth(monkeypatch, FAST)
    path = llama(Size(32, 4096, 32, 8, 128, 14336, 1024, 131072, F16)).sparse(tmp_path / "8b.gguf")
    shape = read_summary(path)
    assert isinstance(shape, ModelShape)
    machine = Machine("cpu", frozenset({"avx2"}), 8, 64 * GB, 56 * GB)
    table = quantization_rows(Subject("8b", shape, path), LoadOptions(), machine, None, {})
    by_name = {row.quantization: row for row in table}
    assert by_name["Q8_0"].size_bytes == pytest.approx(shape.parameters * 8.5 / 8, rel=0.01)
    assert recommended(table) == "Q6_K"
    assert not any(row.model for row in table)
    # A file of four bits has lost what finer ones would keep, and coarser ones would lose more.
    small = Subject("8b", shape.scaled("Q4_0", 0.3), path)
    assert quantization_rows(small, LoadOptions(), machine, None, {}) == ()
