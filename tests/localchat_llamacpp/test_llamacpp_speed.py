"""The probe of this build and the bytes of a token."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from localchat.fit.header import read_header
from localchat.fit.machine import Gpu, Machine
from localchat_llamacpp.speed import bytes_per_token, expected_rate, offloaded_rate
from tests.cli.test_cli_fit import PLAN
from tests.gguf_files import F16, Q8_0, Size, Tensor, llama, qwen2, write_model


def test_a_probe_of_the_real_build_gives_a_rate(tmp_path: Path) -> None:
    rate = expected_rate(read_header(write_model(tmp_path / "m.gguf")), 1)
    assert rate is not None
    assert rate > 0


def test_a_probe_that_fails_gives_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = read_header(write_model(tmp_path / "m.gguf"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    assert expected_rate(header, 1) is None


def test_an_embedding_counts_only_where_it_is_the_output_too(tmp_path: Path) -> None:
    size = Size(layers=1, code=Q8_0)
    embedding = size.width * size.vocab * 34 // 32
    tied = read_header(qwen2(size).sparse(tmp_path / "tied.gguf"))
    apart = read_header(llama(size).sparse(tmp_path / "apart.gguf"))
    assert bytes_per_token(tied) == bytes_per_token(apart)
    assert bytes_per_token(tied)[Q8_0] > embedding


def test_experts_count_as_far_as_they_are_used(tmp_path: Path) -> None:
    raw = llama(Size(layers=1, extra={"llama.expert_count": 8, "llama.expert_used_count": 2}))
    experts = Tensor("blk.0.ffn_up_exps.weight", (64, 128, 8), F16)
    plain = bytes_per_token(read_header(raw.sparse(tmp_path / "plain.gguf")))
    more = type(raw)(raw.metadata, [*raw.tensors, experts])
    found = bytes_per_token(read_header(more.sparse(tmp_path / "more.gguf")))
    assert found[F16] - plain[F16] == 64 * 128 * 2 * 2


def test_past_runs_correct_the_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {0: 1e9, F16: 1e9, Q8_0: 2e9}
    monkeypatch.setattr("localchat_llamacpp.speed._probe", lambda codes, threads: rates)
    small = read_header(llama(Size(layers=1)).sparse(tmp_path / "small.gguf"))
    large = read_header(llama(Size(layers=8, code=Q8_0)).sparse(tmp_path / "large.gguf"))
    plain = expected_rate(small, 2)
    other = expected_rate(large, 2)
    assert plain is not None and other is not None
    half = expected_rate(large, 2, [(small, plain / 2), (small, plain / 2)])
    assert half == pytest.approx(other / 2)
    # One run alone may have been disturbed, and nonsense is bounded.
    assert expected_rate(large, 2, [(small, plain / 2)]) == pytest.approx(0.75 * other)
    wild = expected_rate(large, 2, [(small, plain * 100), (small, plain * 100)])
    assert wild == pytest.approx(1.3 / 0.85 * other)


def test_layers_on_cards_are_priced_by_bandwidth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "localchat_llamacpp.speed._probe", lambda codes, threads: {0: 1e9, F16: 1e9}
    )
    header = read_header(llama(Size(layers=7)).sparse(tmp_path / "m.gguf"))
    work = sum(bytes_per_token(header).values())
    machine = Machine("x", frozenset(), 4, 1, 1, gpus=(Gpu(0, "card", 1, 1, bytes_per_s=10**11),))
    plans = [replace(PLAN, layers=8, gpu_layers=layers) for layers in (8, 4)]
    whole, half = (offloaded_rate(header, plan, machine, 4) for plan in plans)
    cpu = expected_rate(header, 4)
    assert whole == pytest.approx(1 / (work / 0.9e11 + 7 * 100e-6))
    assert whole is not None and half is not None and cpu is not None
    assert 1 / half == pytest.approx(0.5 / whole + 0.5 / cpu)
    # Past runs of any model here were half as fast as estimated: so is this one.
    assert offloaded_rate(header, plans[0], machine, 4, [(header, whole / 2)]) == pytest.approx(
        whole / 2
    )
    unknown = replace(machine, gpus=(Gpu(0, "card", 1, 1),))
    assert offloaded_rate(header, plans[0], unknown, 4) is None
