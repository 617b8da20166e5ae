"""Experts in RAM and layers on several GPUs: the plan, what llama.cpp is told, and the expected speed."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from localchat.backend_api.interface import Device
from localchat.config.paths import find_paths
from localchat.errors import UsageError
from localchat.fit.hardware import Gpu, Machine
from localchat.fit.load_options import ExpertsOnCpu, LoadOptions
from localchat.fit.memory_plan import GpuShare, MemoryPlan, spendable_gpus, weights_split
from localchat.fit.report import placed, verdict
from localchat.model_files.architecture import ModelShape, model_shape
from localchat.model_files.open_gguf import read_header
from localchat.models.catalog import read_catalog
from localchat.models.names import parse
from localchat.models.published_shapes import published_model
from localchat_llamacpp import native_model
from localchat_llamacpp.native import library
from localchat_llamacpp.native_model import Placement, load_weights
from localchat_llamacpp.plan.buffers import layer_weights, split_layers, tensor_split
from localchat_llamacpp.plan.memory_plan import plan
from localchat_llamacpp.plan.speed import expected_rate, routed_token_bytes
from tests.support.llamacpp_models import LAYERS, write_experts
from tests.support.ram_bandwidth import put_bandwidth

GB = 10**9
EXPERTS, DENSE = "qwen3:30b-a3b", "qwen3:14b"


def shape_of(name: str) -> ModelShape:
    found = published_model(parse(name, read_catalog(find_paths(os.environ))))
    assert isinstance(found, ModelShape)
    return found


def desk(*cards_gb: int, ram_gb: int = 32) -> Machine:
    gpus = tuple(
        Gpu(number, "card", size * GB, size * GB, bytes_per_s=300 * GB)
        for number, size in enumerate(cards_gb)
    )
    return Machine("x", frozenset({"avx2"}), 8, ram_gb * GB, (ram_gb - 4) * GB, gpus=gpus)


def planned(
    name: str, machine: Machine, experts: ExpertsOnCpu = "auto", *, can_offload: bool = True
) -> MemoryPlan:
    options = LoadOptions(max_slots=2, experts_on_cpu=experts)
    return plan(shape_of(name), options, machine, can_offload=can_offload)


# ---------------------------------------------------------------------------- the plan


def test_a_smaller_card_leaves_more_experts_in_ram_and_keeps_every_layer() -> None:
    found = [planned(EXPERTS, desk(size)) for size in (6, 8, 12, 16, 24)]
    assert all(one.fits and one.gpu_layers == one.layers == 49 for one in found)
    counts = [one.experts_on_cpu for one in found]
    assert counts == sorted(counts, reverse=True) and counts[0] > 40 and counts[-1] == 0
    for one, size in zip(found, (6, 8, 12, 16, 24), strict=True):
        assert one.gpu_bytes <= spendable_gpus(desk(size))[0]
    told = " ".join(verdict(found[1]))
    assert f"The experts of {counts[1]} of 48 layers stay in RAM" in told
    assert f"the experts of {counts[1]} in RAM" in placed("a GGUF file", found[1])


def test_a_few_more_experts_in_ram_make_room_for_a_long_context() -> None:
    cheap = planned("qwen3.6:35b-a3b", desk(8))
    assert cheap.context_tokens >= 32_768
    # Keys and values of this one cost too many experts: the context stays at the goal.
    dear = planned(EXPERTS, desk(8))
    assert 8192 <= dear.context_tokens < 16_384
    asked = LoadOptions(max_slots=2, context_tokens=4096)
    shape = shape_of("qwen3.6:35b-a3b")
    short = plan(shape, asked, desk(8), can_offload=True)
    assert (short.context_tokens, short.fits) == (4096, True)
    assert short.experts_on_cpu < cheap.experts_on_cpu


def test_windows_alone_are_kept_where_that_puts_more_layers_on_the_gpu() -> None:
    found = planned("gemma4:12b", desk(8))
    assert found.window_only and found.kv_type == "f16"
    shape = shape_of("gemma4:12b")
    asked = LoadOptions(max_slots=16)
    whole = plan(shape, asked, desk(8), can_offload=True)
    assert not whole.window_only and whole.gpu_layers < found.gpu_layers


def test_tables_that_are_looked_up_are_no_need_and_no_reading() -> None:
    shape = shape_of("gemma4:e4b")
    table = next(one for one in shape.weights if one.part == "lookup")
    found = planned("gemma4:e4b", desk(ram_gb=16), can_offload=False)
    assert found.mapped_bytes >= table.size_bytes > 2 * GB
    assert found.weights_bytes < shape.weights_bytes - table.size_bytes // 2
    assert table not in [one for one, _ in shape.read_weights()]
    assert weights_split(shape, shape.all_layers + 1).ram >= table.size_bytes


def test_experts_stay_out_of_the_plan_where_they_cannot_help() -> None:
    dense = planned(DENSE, desk(8))
    assert dense.experts_on_cpu == 0 and 0 < dense.gpu_layers < dense.layers
    unified = replace(desk(ram_gb=16), unified_memory=True)
    assert planned(EXPERTS, unified).experts_on_cpu == 0
    assert not planned(EXPERTS, desk(8, ram_gb=8)).fits


def test_the_asked_number_of_experts_is_kept() -> None:
    some = planned(EXPERTS, desk(24), 10)
    assert (some.experts_on_cpu, some.gpu_layers) == (10, 49)
    by_layers = planned(EXPERTS, desk(8), 0)
    assert by_layers.experts_on_cpu == 0 and 0 < by_layers.gpu_layers < 49
    assert planned(EXPERTS, desk(24), 999).experts_on_cpu == 48


def test_experts_without_a_gpu_build_or_without_experts_are_refused() -> None:
    with pytest.raises(UsageError, match="built for the CPU alone") as caught:
        planned(EXPERTS, desk(8), 10, can_offload=False)
    assert "--rebuild" in caught.value.hint
    with pytest.raises(UsageError, match="has no experts"):
        planned(DENSE, desk(8), 10)
    assert planned(EXPERTS, desk(8, ram_gb=48), can_offload=False).gpu_layers == 0


def test_weights_of_the_plan_are_those_of_the_tensors() -> None:
    shape = shape_of(EXPERTS)
    routed = [weight for weight in shape.weights if weight.routed]
    for count in (0, 1, 17, 48):
        split = weights_split(shape, 49, count)
        kept = sum(weight.size_bytes for weight in routed if weight.layer < count)
        whole = weights_split(shape, 49)
        assert (split.ram - whole.ram, whole.gpu - split.gpu) == (kept, kept)
        assert sum(layer_weights(shape, 49, count)) == split.gpu


# ---------------------------------------------------------------------------- several GPUs


def test_each_gpu_takes_the_layers_that_it_has_room_for() -> None:
    machine = desk(24, 8)
    found = planned("llama3.3:70b", machine)
    assert found.gpu_shares and sum(one.layers for one in found.gpu_shares) == found.gpu_layers
    for share, room in zip(found.gpu_shares, spendable_gpus(machine), strict=True):
        assert share.size_bytes <= room
    first, second = (one.layers for one in found.gpu_shares)
    assert 2 * second < first
    assert f"Layers of each GPU: {first} (" in " ".join(found.notes)
    # Near enough what is said of both together.
    assert sum(one.size_bytes for one in found.gpu_shares) == pytest.approx(
        found.gpu_bytes, rel=0.01
    )
    assert not planned("llama3.1:8b", desk(24)).gpu_shares


def test_equal_gpus_are_filled_alike() -> None:
    assert split_layers([10] * 9, [60, 60]) == (5, 4)
    assert split_layers([10] * 9, [25, 1000]) == (0, 9)
    assert split_layers([10] * 9, [20, 20]) == (2, 7)


def llamacpp_places(shares: list[float], layers: int) -> list[int]:
    """The GPU of each layer, by llama.cpp's rule in its own precision."""
    ends = np.cumsum(np.array(shares, np.float32), dtype=np.float32)
    ends /= ends[-1]
    places = np.arange(layers, dtype=np.float32) / np.float32(layers)
    return [int(place) for place in np.searchsorted(ends, places, side="right")]


@pytest.mark.parametrize("layers", [(5, 4), (1, 48), (0, 7), (7, 0), (20, 1, 0, 28), (33, 33, 33)])
def test_shares_put_the_borders_where_they_were_planned(layers: tuple[int, ...]) -> None:
    places = llamacpp_places(tensor_split(layers), sum(layers))
    assert tuple(places.count(number) for number in range(len(layers))) == layers


def test_shares_go_to_the_gpu_of_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [Device("A", "", "gpu", 0, 8 * GB), Device("B", "", "gpu", 0, 24 * GB)]
    monkeypatch.setattr(native_model, "devices", lambda: listed)
    shares = (GpuShare(30, 0, 24 * GB), GpuShare(10, 0, 8 * GB))
    told = native_model._split(shares)
    assert tuple(llamacpp_places(list(told), 40).count(place) for place in (0, 1)) == (10, 30)
    assert native_model._split(shares[:1]) is None


# ---------------------------------------------------------------------------- what llama.cpp does


def test_experts_of_the_first_layers_are_overridden_and_the_text_is_the_same(
    tmp_path: Path,
) -> None:
    path = write_experts(tmp_path / "experts.gguf")
    shape = model_shape(read_header(path))
    routed = {weight.layer: 0 for weight in shape.weights if weight.routed}
    assert sorted(routed) == list(range(LAYERS))
    texts = []
    for experts in (0, 1, LAYERS):
        with library().log.capture() as captured:
            weights = load_weights(
                path,
                placement=Placement(0, experts),
                safe_mode=True,
                total_bytes=path.stat().st_size,
                progress=lambda done, total: True,
            )
        moved = [line for line in captured.lines if "overridden to" in line]
        assert len(moved) == 3 * experts
        assert all(f"blk.{layer}." in " ".join(moved) for layer in range(experts))
        assert all("_exps.weight" in line for line in moved)
        texts.append(_greedy(weights))
        weights.close()
    assert len(set(texts[0])) > 3
    assert texts[1:] == [texts[0]] * 2


def _greedy(weights: native_model.Weights) -> list[int]:
    spec = native_model.ContextSpec(256, 1, 32, "f16", False, 1, False)
    context, _ = native_model.open_context(weights, spec)
    api = library().api
    vocab = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(weights.handle)))
    found = [1, 2, 3]
    batch = api.llama_batch_init(1, 0, 1)
    try:
        for place in range(24):
            batch.n_tokens = 1
            batch.token[0], batch.pos[0] = found[place], place
            batch.n_seq_id[0], batch.seq_id[0][0], batch.logits[0] = 1, 0, 1
            assert api.llama_decode(context, batch) == 0
            if place >= 2:
                logits = np.ctypeslib.as_array(api.llama_get_logits_ith(context, 0), (vocab,))
                found.append(int(logits.argmax()))
    finally:
        api.llama_batch_free(batch)
        api.llama_free(context)
    return found


# ---------------------------------------------------------------------------- the speed


def test_a_token_reads_its_experts_from_ram_and_the_rest_from_the_card(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put_bandwidth(monkeypatch, 40.0 * GB)
    machine, shape = desk(8), shape_of(EXPERTS)
    split = planned(EXPERTS, machine)
    by_layers = planned(EXPERTS, machine, 0)
    fast, slow = (expected_rate(shape, one, machine, 8) for one in (split, by_layers))
    assert fast is not None and slow is not None
    assert fast.tokens_per_s > 1.2 * slow.tokens_per_s
    experts = routed_token_bytes(shape, split.experts_on_cpu)
    assert 0.3 < experts / shape.token_bytes < 0.8
    # Reading alone is a bound that the estimate must respect.
    floor_s = experts / (40 * GB) + (shape.token_bytes - experts) / (300 * GB)
    assert fast.tokens_per_s < 1 / floor_s
