"""Predicted decode speed: bytes that a token reads over the bandwidth of the memory that holds them."""

from dataclasses import replace
from pathlib import Path

import pytest

from localchat.fit.hardware import Gpu, Machine
from localchat.fit.memory_plan import MemoryPlan
from localchat.fit.speed import Estimate
from localchat.model_files.architecture import ModelShape, model_shape
from localchat.model_files.open_gguf import read_header
from localchat_llamacpp.plan.speed import expected_rate
from tests.support.gguf_files import F16, Q8_0, Size, Tensor, llama, qwen2
from tests.support.memory_plans import PLAN
from tests.support.ram_bandwidth import put_bandwidth
from tests.support.synthetic_gguf import SyntheticModel, write

BANDWIDTH = 10e9
MACHINE = Machine("x", frozenset(), 4, 1, 1)
CARD = Gpu(0, "card", 1, 1, bytes_per_s=10**11)
ON_CPU = replace(PLAN, layers=8, gpu_layers=0)


@pytest.fixture(autouse=True)
def bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    put_bandwidth(monkeypatch, BANDWIDTH)


def read_shape(path: Path) -> ModelShape:
    return model_shape(read_header(path))


def estimate_of(
    shape: ModelShape, plan: MemoryPlan = ON_CPU, machine: Machine = MACHINE
) -> Estimate:
    estimate = expected_rate(shape, plan, machine, 2)
    assert estimate is not None
    return estimate


# ---------------------------------------------------------------------------- bytes of a token


def test_an_embedding_counts_only_where_it_is_the_output_too(tmp_path: Path) -> None:
    size = Size(layers=1, code=Q8_0)
    embedding = size.width * size.vocab * 34 // 32
    tied = read_shape(qwen2(size).sparse(tmp_path / "tied.gguf"))
    apart = read_shape(llama(size).sparse(tmp_path / "apart.gguf"))
    assert tied.token_bytes == apart.token_bytes
    assert tied.token_bytes > embedding


def test_experts_count_as_far_as_they_are_used(tmp_path: Path) -> None:
    raw = llama(Size(layers=1, extra={"llama.expert_count": 8, "llama.expert_used_count": 2}))
    experts = Tensor("blk.0.ffn_up_exps.weight", (64, 128, 8), F16)
    alone = read_shape(raw.sparse(tmp_path / "plain.gguf"))
    more = type(raw)(raw.metadata, [*raw.tensors, experts])
    shape = read_shape(more.sparse(tmp_path / "more.gguf"))
    assert shape.token_bytes - alone.token_bytes == 64 * 128 * 2 * 2


def test_a_synthetic_model_has_the_stated_layers(tmp_path: Path) -> None:
    write(tmp_path / "s.gguf", SyntheticModel(2, 4, 2, 32, 64, 96, "Q8_0"))
    shape = read_shape(tmp_path / "s.gguf")
    layers = [weight.size_bytes for weight in shape.weights if weight.part == "layer"]
    matrices = 2 * 64 * 128 + 2 * 64 * 64 + 3 * 64 * 96
    assert sum(layers) == 2 * (matrices // 32 * 34 + 2 * 64 * 4)
    assert shape.all_layers == 2


# ---------------------------------------------------------------------------- the prediction


def test_a_token_reads_its_weights_and_passes_its_layers(tmp_path: Path) -> None:
    shape = read_shape(llama(Size(layers=5)).sparse(tmp_path / "m.gguf"))
    estimate = estimate_of(shape)
    seconds = shape.token_bytes / (0.6 * BANDWIDTH) + 5 * 0.2e-3
    assert 0 < 1 / estimate.tokens_per_s - seconds < 1e-3  # the engine's own time
    assert estimate.low < estimate.tokens_per_s < estimate.high


def test_layers_on_cards_are_priced_by_their_bandwidth(tmp_path: Path) -> None:
    shape = read_shape(llama(Size(layers=7)).sparse(tmp_path / "m.gguf"))
    machine = replace(MACHINE, gpus=(CARD,))
    all_layers, half = (replace(PLAN, layers=8, gpu_layers=count) for count in (8, 4))
    whole = estimate_of(shape, all_layers, machine).tokens_per_s
    expected_s = shape.token_bytes / 0.9e11 + 7 * 100e-6
    assert 1 / whole - expected_s == pytest.approx(0.4e-3)
    cpu = estimate_of(shape).tokens_per_s
    split = estimate_of(shape, half, machine).tokens_per_s
    assert 1 / split == pytest.approx(0.5 / whole + 0.5 / cpu)


def test_a_card_of_unknown_bandwidth_gives_no_prediction(tmp_path: Path) -> None:
    shape = read_shape(llama(Size(layers=7)).sparse(tmp_path / "m.gguf"))
    machine = replace(MACHINE, gpus=(replace(CARD, bytes_per_s=0),))
    assert expected_rate(shape, replace(PLAN, layers=8, gpu_layers=8), machine, 2) is None
    assert expected_rate(shape, ON_CPU, machine, 2) is not None
