"""Random requests on a tiny pool of pages: cancels, preemptions, several choices, refusals; books intact and
nothing left behind. scripts/tools/stress_cuda.py runs thousands."""

from pathlib import Path

from scripts.bench.cuda.stress import stress
from tests.support import tiny_models
from tests.support.tiny_engine_core import tiny_runner


def test_random_requests_leave_no_state(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.reference("qwen2"), tmp_path)
    told = stress(tiny_runner(tmp_path, blocks=9, slots=6, context=256, step=48), 60, seed=1)
    assert told["answered"] + told["cancelled"] + told["refused"] == 60
    assert min(told["answered"], told["cancelled"], told["refused"], told["preemptions"]) > 0
