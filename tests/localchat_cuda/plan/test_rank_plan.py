"""Plans of loads on several GPUs: sizes of each one, their number, and what more of them bring."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localchat.errors import UsageError
from localchat.fit.hardware import Gpu, Machine
from localchat.fit.load_options import LoadOptions
from localchat.model_files.checkpoint import read_checkpoint
from localchat_cuda.environment import usable_gpus
from localchat_cuda.plan.preflight import plan_for
from localchat_cuda.plan.rank_plan import RankLoad
from tests.support import checkpoint_folders
from tests.support.cuda_machines import CONFIG, GB, gpu, header


def load(weights: int, *gpus: Gpu, **options: Any) -> RankLoad:
    wanted = LoadOptions(max_slots=2, **options)
    return RankLoad("The model", CONFIG, (header(weights),), wanted, gpus)


def test_each_of_two_gpus_has_half_of_weights_and_kv() -> None:
    cards = gpu(20 * GB), gpu(22 * GB)
    one = load(15 * GB, *cards).plan()
    two = load(15 * GB, *cards, gpus=2).plan()
    assert (one.gpus, two.gpus) == (1, 2)
    assert 0.5 < two.weights_bytes / one.weights_bytes < 0.51
    assert two.kv_bytes / two.kv_tokens == pytest.approx(one.kv_bytes / one.kv_tokens / 2)
    assert two.free_bytes == one.free_bytes
    assert "2 GPUs compute together" in two.notes[0]


def test_auto_takes_the_fewest_gpus_with_room() -> None:
    cards = [gpu(22 * GB)] * 4
    assert load(15 * GB, *cards, gpus="auto").plan().gpus == 1
    assert load(30 * GB, *cards, gpus="auto").plan().gpus == 2
    assert load(60 * GB, *cards, gpus="auto").plan().gpus == 4
    far_too_large = load(900 * GB, *cards, gpus="auto").plan()
    assert not far_too_large.fits


def test_a_plan_for_one_gpu_says_what_a_second_one_brings() -> None:
    cards = [gpu(22 * GB)] * 2
    notes = " ".join(load(30 * GB, *cards).plan().notes)
    assert "With --gpus 2: 15.0 GB of weights on each, the model fits with" in notes
    assert "of weights on each, room for" in " ".join(load(15 * GB, *cards).plan().notes)
    assert "still too little memory" in " ".join(load(60 * GB, *cards).plan().notes)
    assert "--gpus" not in " ".join(load(30 * GB, gpu(22 * GB)).plan().notes)


@pytest.mark.parametrize(("count", "words"), [(1, "one NVIDIA GPU is"), (2, "2 NVIDIA GPUs are")])
def test_more_gpus_than_there_are_is_refused(count: int, words: str) -> None:
    with pytest.raises(UsageError, match=rf"--gpus 4 is not possible: {words} usable here"):
        load(GB, *[gpu(22 * GB)] * count, gpus=4).plan()


def test_without_a_gpu_a_plan_for_two_says_that_there_is_none(tmp_path: Path) -> None:
    checkpoint_folders.write(tmp_path, {"lm_head.weight": ("BF16", (16, 16), 512)})
    machine = Machine("cpu", frozenset(), 1, 1 << 34, 1 << 33)
    plan = plan_for(read_checkpoint(tmp_path), LoadOptions(gpus=2), machine)
    assert "needs an NVIDIA GPU" in plan.missing


def test_gpus_that_cannot_compute_are_left_out() -> None:
    old = replace(gpu(23 * GB), compute_capability=(7, 0))
    small, large = (replace(gpu(n * GB), compute_capability=(9, 0)) for n in (10, 20))
    assert usable_gpus([old, small, large]) == [2, 1]
    assert usable_gpus([old]) == [0]
    assert usable_gpus([]) == []
