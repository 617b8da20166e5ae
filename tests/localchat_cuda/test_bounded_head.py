"""The int8 copy of the head that a runner draws with: when it is used, and what a load plans for it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from localchat.engine.events import Text
from localchat.fit.load_options import LoadOptions
from localchat_cuda.config.reader import parse_config
from localchat_cuda.plan import memory_plan
from localchat_cuda.plan.memory_plan import plan
from localchat_cuda.plan.weight_sizes import head_bounds_bytes
from localchat_cuda.runner.model import DeviceModel
from tests.support import tiny_models
from tests.support.cuda_configs import QWEN25
from tests.support.cuda_machines import CONFIG, GB, gpu, header
from tests.support.tiny_engine_core import TinyLoop, request, tiny_runner
from tests.support.tiny_models import tokens_of

ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-k": {"temperature": 0.9, "top_k": 3, "seed": 4},
    "penalised": {"temperature": 0.0, "frequency_penalty": 0.5},
}
WHOLE: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 0},
    "top-p": {"temperature": 0.9, "top_p": 0.9, "seed": 4},
}


def said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], *, bounded: bool
) -> tuple[str, int]:
    """An answer of the kernels, and in how many steps the copy gave the logits."""
    rows: list[int] = []
    own = DeviceModel.approximate_logits

    def counted(self: DeviceModel, states: torch.Tensor, out: torch.Tensor) -> Any:
        rows.append(states.shape[0])
        return own(self, states, out)

    monkeypatch.setattr(DeviceModel, "approximate_logits", counted)
    runner = tiny_runner(folder, dtype=torch.float16, kernels=True, head_bounds=bounded)
    settings = {"logprobs": None, "max_tokens": 3, **how}
    told = TinyLoop(runner, speculation=False).say(request(tokens_of(3, 9), **settings))
    monkeypatch.undo()
    assert set(rows) <= {1}
    return "".join(one.text for one in told.events if isinstance(one, Text)), len(rows)


@pytest.mark.parametrize("how", sorted(ASKED))
def test_a_bounded_head_says_the_same(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_models.save(tiny_models.reference("qwen2", num_hidden_layers=1), tmp_path)
    text, steps = said(tmp_path, monkeypatch, ASKED[how], bounded=True)
    assert (text, 0) == said(tmp_path, monkeypatch, ASKED[how], bounded=False)
    assert steps > 0
    assert text


def test_a_head_of_another_width_is_bounded_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_models.reference("qwen2", num_hidden_layers=1, hidden_size=192)
    tiny_models.save(model, tmp_path)
    text, steps = said(tmp_path, monkeypatch, ASKED["greedy"], bounded=True)
    assert (text, 0) == said(tmp_path, monkeypatch, ASKED["greedy"], bounded=False)
    assert steps > 0


@pytest.mark.parametrize("how", sorted(WHOLE))
def test_what_needs_all_logits_is_computed_by_the_whole_head(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_models.save(tiny_models.reference("qwen2", num_hidden_layers=1), tmp_path)
    assert said(tmp_path, monkeypatch, WHOLE[how], bounded=True)[1] == 0


def test_the_plan_counts_the_copy_where_it_shortens_no_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    roomy, asked = gpu(140 * GB, 141 * GB), LoadOptions(max_slots=2)
    with monkeypatch.context() as without:
        without.setattr(memory_plan, "HEAD_BOUNDS", False)
        usual = plan(CONFIG, [header(15 * GB)], asked, roomy)
    found = plan(CONFIG, [header(15 * GB)], asked, roomy)
    assert (usual.head_bounds, found.head_bounds) == (False, True)
    assert found.weights_bytes - usual.weights_bytes == head_bounds_bytes(CONFIG)
    assert head_bounds_bytes(CONFIG) == CONFIG.vocabulary * (CONFIG.hidden + 8)
    tight = gpu(19 * GB, 24 * GB)
    assert not plan(CONFIG, [header(15 * GB)], asked, tight).head_bounds
    odd = parse_config({**QWEN25, "hidden_size": 1792 + 64, "head_dim": 64}, "it")
    assert plan(odd, [header(15 * GB)], asked, roomy).head_bounds
    assert head_bounds_bytes(odd) == odd.vocabulary * (1920 + 8)
