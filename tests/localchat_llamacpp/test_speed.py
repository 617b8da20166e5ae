"""Speed estimates: the probe of this build, the bytes read per token, and the estimate made of both."""

import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from localchat.fit.hardware import Gpu, Machine
from localchat.fit.speed_history import NO_MEASUREMENTS, Estimate, MeasurementCache
from localchat.model_files.architecture import ModelShape, model_shape
from localchat.model_files.open_gguf import read_header
from localchat_llamacpp.speed import benchmark, estimate
from localchat_llamacpp.speed.benchmark import BenchmarkRequest, BenchmarkResult, Costs, Layer
from localchat_llamacpp.speed.estimate import (
    DecodeSetup,
    bytes_per_token,
    expected_rate,
    measured_setup,
    offloaded_rate,
)
from localchat_llamacpp.speed.synthetic_gguf import SyntheticModel, write
from tests.support.gguf_files import F16, Q8_0, Size, Tensor, gemma3, llama, qwen2, write_model
from tests.support.memory_plans import PLAN

RATES = {0: 1e9, F16: 1e9, Q8_0: 2e9}
LAYER_S, STEP_S = 1e-3, 0.1e-3


def rate_of(found: Estimate | None) -> float:
    assert found is not None
    return found.tokens_per_s


def read_shape(path: Path) -> ModelShape:
    return model_shape(read_header(path))


def plain(shape: ModelShape) -> DecodeSetup:
    return DecodeSetup(shape, "f16", False)


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_disturbed", None)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Layer]:
    """The probe answers at once, and these layers were asked for."""
    seen: list[Layer] = []

    def costs(
        threads: int, codes: Iterable[int], layers: Iterable[Layer], measures: MeasurementCache
    ) -> Costs:
        seen.extend(layers)
        return Costs(RATES, dict.fromkeys(seen, LAYER_S), STEP_S)

    monkeypatch.setattr(estimate, "costs", costs)
    return seen


# ---------------------------------------------------------------------------- the probe


def test_a_probe_of_the_real_build_gives_a_rate(tmp_path: Path) -> None:
    shape = read_shape(write_model(tmp_path / "m.gguf"))
    found = benchmark.costs(1, bytes_per_token(shape), [LAYER], NO_MEASUREMENTS)
    assert all(0 < rate < 1e13 for rate in found.bytes_per_s.values())
    assert found.bytes_per_s.keys() == bytes_per_token(shape).keys()
    assert 0 < found.layer_s[LAYER] < 1
    assert 0 < found.step_s < 1


LAYER = Layer(4, 2, 32, "q8_0", True, Q8_0)


def test_a_busy_machine_is_not_measured_for_each_model_of_a_list(
    questions: list[BenchmarkRequest], tmp_path: Path
) -> None:
    other = Layer(8, 2, 32, "q8_0", True, Q8_0)
    benchmark.costs(2, [8, 1], [LAYER], MeasurementCache(tmp_path))
    found = benchmark.costs(2, [8, 1], [other], MeasurementCache(tmp_path))
    assert found == Costs({1: 1e9, 8: 1e9}, {}, STEP_S, quiet=False)
    assert len(questions) == 1


def test_a_probe_that_fails_gives_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = read_shape(write_model(tmp_path / "m.gguf"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    assert expected_rate(plain(shape), 1, NO_MEASUREMENTS) is None


def test_a_probe_that_crashes_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places, probe, wrote = tmp_path / "places", tmp_path / "probe", tmp_path / "wrote"
    places.mkdir()
    probe.write_text(
        f'#!/bin/sh\necho stand-in > "$TMPDIR/m.gguf" && touch {wrote}\nkill -SEGV $$\n'
    )
    probe.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(probe))
    monkeypatch.setattr(tempfile, "tempdir", str(places))
    monkeypatch.setenv("TMPDIR", str(places))
    assert not list(benchmark._benchmark(BenchmarkRequest(1, (Q8_0,), ()), 5.0))
    assert wrote.exists()
    assert not list(places.iterdir())


def test_a_synthetic_model_has_the_size_it_states(tmp_path: Path) -> None:
    model = SyntheticModel(2, 4, 2, 32, 64, 96, Q8_0)
    write(tmp_path / "s.gguf", model)
    shape = read_shape(tmp_path / "s.gguf")
    layers = [one.size_bytes for one in shape.weights if one.part == "layer"]
    assert sum(layers) == model.weights_bytes
    assert shape.all_layers == 2


Answer = Callable[[BenchmarkRequest], list[BenchmarkResult]]


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[BenchmarkRequest]:
    """Requests that reach the probe; it answers all of them, format 1 beside other programs."""
    seen: list[BenchmarkRequest] = []

    def ask(request: BenchmarkRequest, timeout_s: float) -> list[BenchmarkResult]:
        seen.append(request)
        return [
            BenchmarkResult(True, step_s=STEP_S),
            *(BenchmarkResult(code != 1, code=code, bytes_per_s=1e9) for code in request.codes),
            *(BenchmarkResult(True, layer=layer, layer_s=LAYER_S) for layer in request.layers),
        ]

    monkeypatch.setattr(benchmark, "_benchmark", ask)
    return seen


def test_a_probe_that_crashed_is_asked_again_in_safe_mode(
    questions: list[BenchmarkRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = benchmark._benchmark

    def ask(request: BenchmarkRequest, timeout_s: float) -> list[BenchmarkResult]:
        found = list(whole(request, timeout_s))
        return found if request.safe_mode else found[:-1]

    monkeypatch.setattr(benchmark, "_benchmark", ask)
    found = benchmark.costs(2, [8], [LAYER], MeasurementCache(tmp_path))
    assert found.layer_s == {LAYER: LAYER_S}
    assert [one.safe_mode for one in questions] == [False, True, True]


def test_what_was_measured_is_not_measured_again(
    questions: list[BenchmarkRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = benchmark.costs(2, [8, 1], [LAYER], MeasurementCache(tmp_path))
    again = benchmark.costs(2, [1, 8], [LAYER], MeasurementCache(tmp_path))
    assert first == again == Costs({1: 1e9, 8: 1e9}, {LAYER: LAYER_S}, STEP_S, quiet=False)
    assert len(questions) == 1
    # What was taken beside other programs counts for a minute and is not kept.
    monkeypatch.setattr(benchmark, "_DISTURBED_FRESH_S", 0.0)
    monkeypatch.setattr(benchmark, "_disturbed", None)
    assert benchmark.costs(2, [1, 8], [LAYER], MeasurementCache(tmp_path)) == first
    assert [one.codes for one in questions] == [(1, 8), (1,)]
    assert [one.layers for one in questions] == [(LAYER,), ()]
    assert benchmark.costs(2, [8], [LAYER], MeasurementCache(tmp_path)).quiet
    assert len(questions) == 2


def test_a_format_that_was_not_asked_for_yet_is_measured_beside_other_programs_too(
    questions: list[BenchmarkRequest], tmp_path: Path
) -> None:
    benchmark.costs(2, [1], [], MeasurementCache(tmp_path))
    second = benchmark.costs(2, [1, 8], [LAYER], MeasurementCache(tmp_path))
    assert second.bytes_per_s == {1: 1e9, 8: 1e9}
    assert not second.quiet
    assert [one.codes for one in questions] == [(1,), (8,), (8,)]  # two probes of 8 agree


def test_other_threads_and_another_build_are_measured_anew(
    questions: list[BenchmarkRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark.costs(2, [8], [], MeasurementCache(tmp_path))
    benchmark.costs(1, [8], [], MeasurementCache(tmp_path))
    monkeypatch.setattr(benchmark, "build_key", lambda: "another build")
    benchmark.costs(2, [8], [], MeasurementCache(tmp_path))
    assert [one.threads for one in questions[::2]] == [2, 1, 2]  # two probes agree each time


@pytest.mark.parametrize(
    ("rates", "known", "taken"),
    [
        ((9.0, 9.5), None, 9.5),  # two agree
        ((6.0, 9.0, 9.1), None, 9.1),  # one that was badly placed
        ((6.0, 9.0, 3.0), None, 9.0),
        ((9.0,), 9.2, 9.0),  # as it was an hour ago
        ((6.0, 9.0), 9.2, 9.0),
        ((5.0, 5.1, 5.0), 9.2, 5.1),  # on battery now
    ],
)
def test_a_probe_that_was_badly_placed_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    rates: tuple[float, ...],
    known: float | None,
    taken: float,
) -> None:
    coming = list(rates)

    def ask(request: BenchmarkRequest, timeout_s: float) -> list[BenchmarkResult]:
        rate = coming.pop(0)
        return [
            BenchmarkResult(True, step_s=STEP_S),
            BenchmarkResult(True, code=Q8_0, bytes_per_s=rate),
            *(BenchmarkResult(True, layer=layer, layer_s=rate) for layer in request.layers),
        ]

    measures = MeasurementCache(tmp_path)
    if known is not None:
        monkeypatch.setattr(
            benchmark,
            "_benchmark",
            lambda request, timeout_s: [BenchmarkResult(True, code=Q8_0, bytes_per_s=known)],
        )
        benchmark.costs(2, [Q8_0], [], measures)
    monkeypatch.setattr(benchmark, "_benchmark", ask)
    found = benchmark.costs(2, [Q8_0], [LAYER], measures)
    assert found.layer_s[LAYER] == taken
    assert not coming


# ---------------------------------------------------------------------------- bytes of a token


def test_an_embedding_counts_only_where_it_is_the_output_too(tmp_path: Path) -> None:
    size = Size(layers=1, code=Q8_0)
    embedding = size.width * size.vocab * 34 // 32
    tied = read_shape(qwen2(size).sparse(tmp_path / "tied.gguf"))
    apart = read_shape(llama(size).sparse(tmp_path / "apart.gguf"))
    assert bytes_per_token(tied) == bytes_per_token(apart)
    assert bytes_per_token(tied)[Q8_0] > embedding


def test_experts_count_as_far_as_they_are_used(tmp_path: Path) -> None:
    raw = llama(Size(layers=1, extra={"llama.expert_count": 8, "llama.expert_used_count": 2}))
    experts = Tensor("blk.0.ffn_up_exps.weight", (64, 128, 8), F16)
    alone = bytes_per_token(read_shape(raw.sparse(tmp_path / "plain.gguf")))
    more = type(raw)(raw.metadata, [*raw.tensors, experts])
    found = bytes_per_token(read_shape(more.sparse(tmp_path / "more.gguf")))
    assert found[F16] - alone[F16] == 64 * 128 * 2 * 2


# ---------------------------------------------------------------------------- the estimate


def test_a_token_takes_its_products_and_a_constant_a_layer(
    tmp_path: Path, asked: list[Layer]
) -> None:
    shape = read_shape(llama(Size(layers=5)).sparse(tmp_path / "m.gguf"))
    rate = rate_of(expected_rate(plain(shape), 2, NO_MEASUREMENTS))
    products_s = sum(count / RATES[code] for code, count in bytes_per_token(shape).items())
    beside_s = 0.93 / rate - products_s - 5 * LAYER_S - STEP_S
    assert 0 < beside_s < 1e-3  # the loop's own


def test_a_layer_is_measured_with_the_models_heads_and_cache(
    tmp_path: Path, asked: list[Layer]
) -> None:
    size = Size(heads=4, kv_heads=2, head_width=32)
    shape = read_shape(llama(size).sparse(tmp_path / "m.gguf"))
    expected_rate(DecodeSetup(shape, "q8_0", True), 2, NO_MEASUREMENTS)
    assert asked == [Layer(4, 2, 32, "q8_0", True, F16)]


def test_heads_that_no_synthetic_model_can_have_cost_a_usual_layer(
    tmp_path: Path, asked: list[Layer]
) -> None:
    shape = read_shape(llama(Size(layers=3)).sparse(tmp_path / "m.gguf"))
    unusual = DecodeSetup(shape, "q8_0", True)  # 16 columns are no whole block of 32
    assert unusual.layer is None
    rate = rate_of(expected_rate(unusual, 2, NO_MEASUREMENTS))
    assert 1 / rate > 3 * 0.2e-3


def test_what_was_measured_beside_other_programs_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = read_shape(llama(Size(layers=5)).sparse(tmp_path / "m.gguf"))
    heads = plain(shape).layer
    assert heads is not None

    def found(layer_s: float, quiet: bool) -> Estimate:
        answer = Costs(dict.fromkeys(RATES, 9e9), {heads: layer_s}, 20e-3, quiet)
        monkeypatch.setattr(estimate, "costs", lambda *asked: answer)
        expected = expected_rate(plain(shape), 2, NO_MEASUREMENTS)
        assert expected is not None
        return expected

    # Threads that had to wait for a core say nothing about a layer.
    assert found(50e-3, quiet=False).disturbed
    assert found(50e-3, quiet=False).tokens_per_s > 20 * found(50e-3, quiet=True).tokens_per_s
    assert not found(50e-3, quiet=True).disturbed


def test_next_to_nothing_beside_other_programs_is_no_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = read_shape(llama(Size(layers=5)).sparse(tmp_path / "m.gguf"))
    for rate, quiet, known in ((1e6, False, False), (1e6, True, True), (9e9, False, True)):
        answer = Costs(dict.fromkeys(RATES, rate), {}, 1e-3, quiet)
        monkeypatch.setattr(estimate, "costs", lambda *asked, answer=answer: answer)
        assert (expected_rate(plain(shape), 2, NO_MEASUREMENTS) is not None) == known


def test_past_runs_correct_the_estimate(tmp_path: Path, asked: list[Layer]) -> None:
    small = read_shape(llama(Size(layers=1)).sparse(tmp_path / "small.gguf"))
    large = read_shape(gemma3(Size(layers=8, code=Q8_0)).sparse(tmp_path / "large.gguf"))
    first = rate_of(expected_rate(plain(small), 2, NO_MEASUREMENTS))
    other = rate_of(expected_rate(plain(large), 2, NO_MEASUREMENTS))

    def corrected(rate: float, times: int) -> float:
        past = [measured_setup(small, "f16", rate)] * times
        return rate_of(expected_rate(plain(large), 2, NO_MEASUREMENTS, past))

    # A few runs may have been disturbed, and nonsense is bounded.
    assert corrected(first / 2, 1) == pytest.approx((0.5 + 1.5) / 2.5 * other)
    assert corrected(first / 2, 3) == pytest.approx((3 * 0.5 + 1.5) / 4.5 * other)
    assert corrected(first / 2, 100) == pytest.approx(other / 2, rel=0.02)
    assert corrected(first * 100, 2) == pytest.approx(1.6 / 0.93 * other)


def test_layers_on_cards_are_priced_by_bandwidth(tmp_path: Path, asked: list[Layer]) -> None:
    shape = read_shape(llama(Size(layers=7)).sparse(tmp_path / "m.gguf"))
    running = plain(shape)
    work = sum(bytes_per_token(shape).values())
    machine = Machine("x", frozenset(), 4, 1, 1, gpus=(Gpu(0, "card", 1, 1, bytes_per_s=10**11),))
    plans = [replace(PLAN, layers=8, gpu_layers=layers) for layers in (8, 4)]
    whole, half = (
        rate_of(offloaded_rate(running, plan, machine, 4, NO_MEASUREMENTS)) for plan in plans
    )
    cpu = rate_of(expected_rate(running, 4, NO_MEASUREMENTS))
    assert whole == pytest.approx(1 / (work / 0.9e11 + 7 * 100e-6))
    assert 1 / half == pytest.approx(0.5 / whole + 0.5 / cpu)
    # PastRun runs of any model here were half as fast as estimated: so is this one.
    past = [measured_setup(shape, "f16", whole / 2)]
    again = offloaded_rate(running, plans[0], machine, 4, NO_MEASUREMENTS, past)
    assert rate_of(again) == pytest.approx(whole / 2)
    unknown = replace(machine, gpus=(Gpu(0, "card", 1, 1),))
    assert offloaded_rate(running, plans[0], unknown, 4, NO_MEASUREMENTS) is None
