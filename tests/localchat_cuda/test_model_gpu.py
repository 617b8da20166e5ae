"""On an NVIDIA GPU: within twice the error of torch's own half precision, and the same with graphs and
without. TRITON_INTERPRET=0 pytest tests/localchat_cuda."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import quantizers, tiny_models
from tests.support.gpu_models import HALVES, logs_of
from tests.support.tiny_engine_core import ON_GPU, TinyLoop, request, tiny_runner
from tests.support.tiny_models import KINDS, tokens_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU, reason="no NVIDIA GPU, or TRITON_INTERPRET is not 0"),
]


@pytest.mark.parametrize("awq", [False, True])
@pytest.mark.parametrize("half", sorted(HALVES))
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_logprobs_are_within_twice_the_error_of_torch(
    kind: str, half: str, awq: bool, tmp_path: Path
) -> None:
    if awq and kind == "llama":
        pytest.skip("its products have fewer outputs than the packed forms take")
    if awq and kind == "gemma4-moe":
        pytest.skip("its experts are never packed")
    if awq and kind in ("gpt-oss", "nemotron-h-moe", "lfm2-moe"):
        pytest.skip("its products have inputs that AWQ cannot divide into groups")
    model, tokens = tiny_models.reference(kind), tokens_of(51, 200)
    (tiny_models.save_awq if awq else tiny_models.save)(model, tmp_path)
    exact = logs_of(model, tokens)
    theirs = logs_of(model.to(HALVES[half]).cuda(), tokens) - exact
    for chunk in (7, 64, 200):
        runner = tiny_runner(tmp_path, dtype=HALVES[half], step=chunk)
        told = TinyLoop(runner).say(request(tokens, prompt_logprobs=0, max_tokens=1))
        ours = torch.tensor([entry.logprob for entry in told.prompt_logprobs]) - exact
        ratio = float(ours.norm() / theirs.norm())
        print(f"{kind} {half} awq={awq} chunk {chunk}: {ratio:.2f} of torch's error")
        assert ratio < 2.0


@pytest.mark.parametrize("half", sorted(HALVES))
@pytest.mark.parametrize(
    ("version", "floating", "size"),
    [(0, "-", 128), (1, "-", 128), (1, "o_proj", 128), (1, "-", 32), (0, "-", 64)],
)
def test_scattered_groups_are_within_twice_the_error_of_torch(
    version: int, floating: str, size: int, half: str, tmp_path: Path
) -> None:
    """Also where some layers stay floating."""
    model = tiny_models.reference("qwen3", **{**quantizers.WIDE, "num_hidden_layers": 2})
    way = quantizers.Way(size=size, ordered=True)
    quantizers.save(model, tmp_path, way, version, floating=floating)
    tokens = tokens_of(53, 200)
    exact = logs_of(model, tokens)
    theirs = logs_of(model.to(HALVES[half]).cuda(), tokens) - exact
    for chunk in (3, 7, 16, 30, 64, 200):
        runner = tiny_runner(tmp_path, dtype=HALVES[half], step=chunk)
        told = TinyLoop(runner).say(request(tokens, prompt_logprobs=0, max_tokens=1))
        ours = torch.tensor([entry.logprob for entry in told.prompt_logprobs]) - exact
        ratio = float(ours.norm() / theirs.norm())
        print(f"version {version} {floating} {half} chunk {chunk}: {ratio:.2f} of torch's error")
        assert ratio < 2.0


SAVED: dict[str, Callable[[Any, Path], None]] = {
    "plain": tiny_models.save,
    "awq": tiny_models.save_awq,
    "awq-32": partial(quantizers.save, way=quantizers.Way(size=32), version="awq"),
    "awq-64": partial(quantizers.save, way=quantizers.Way(size=64), version="awq"),
    "order": partial(quantizers.save, way=quantizers.Way(ordered=True)),
    "order-mixed": partial(quantizers.save, way=quantizers.Way(ordered=True), floating="o_proj"),
}


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
@pytest.mark.parametrize("stored", sorted(SAVED))
@pytest.mark.parametrize("penalised", [False, True])
def test_graphs_change_no_bit(kind: str, stored: str, tmp_path: Path, penalised: bool) -> None:
    wide = (
        {"hidden_size": 256, "intermediate_size": 384} if "-" in stored or stored == "order" else {}
    )
    model = tiny_models.reference(kind, **wide)
    SAVED[stored](model, tmp_path)
    texts = []
    for graphs in (False, True):
        loop = TinyLoop(tiny_runner(tmp_path, graphs=graphs))
        ids = [
            loop.ask(
                request(
                    tokens_of(60 + i, 30),
                    max_tokens=40,
                    temperature=0.7,
                    seed=i,
                    repetition_penalty=1.0 + 0.1 * penalised,
                )
            )
            for i in range(3)
        ]
        loop.run_until_idle()
        assert bool(loop.runner.graphs.count) == graphs
        texts.append([loop.received[i].logprobs() for i in ids])
    assert texts[0] == texts[1]


def test_drafts_are_verified_by_graphs_too(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.reference("qwen2"), tmp_path)
    prompt = tokens_of(70, 12) * 8
    asked = request(prompt, max_tokens=100)
    plain = TinyLoop(tiny_runner(tmp_path)).say(asked)
    loop = TinyLoop(tiny_runner(tmp_path))
    drafted = loop.say(request(prompt, max_tokens=100, speculation=True))
    same = [a == b for a, b in zip(plain.tokens(), drafted.tokens(), strict=True)]
    assert (
        all(same)
        or plain.logprobs()[same.index(False)].top[0][2]
        - (plain.logprobs()[same.index(False)].top[1][2])
        < 0.1
    )
