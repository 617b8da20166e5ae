"""llama.cpp at a constant speed: a step takes as long as its tokens say, whatever else the machine does.

`--backend scripts.tools.paced_backend:PacedBackend`. The wait in a queue tells what a plan is worth
only where the server has one speed; cores shared with others have a new one every few seconds. All is as in the
product but the end of a step, which comes no earlier than SECONDS and TOKEN_SECONDS say. They are chosen for
the guide on two slow cores: a step that really takes longer ends late.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from localchat.backend_api.interface import OpenModel, StepResult
from localchat_llamacpp.backend import LlamaCppBackend
from localchat_llamacpp.runner import LlamaCppRunner

SECONDS, TOKEN_SECONDS = 0.02, 0.002


class PacedBackend(LlamaCppBackend):
    """See the module."""

    name = "paced"

    def open(self, path: Path, notify: Callable[[str], None]) -> OpenModel:
        model: Any = super().open(path, notify)
        load = model.load

        def load_paced(*arguments: Any) -> Any:  # noqa: ANN401 - those of OpenModel.load
            runner = load(*arguments)
            _pace(runner)
            return runner

        model.load = load_paced
        opened: OpenModel = model
        return opened


def _pace(runner: LlamaCppRunner) -> None:
    """Let each step of a runner end when its time is over."""
    collect = runner.collect

    def collect_paced() -> StepResult:
        tokens = sum(row.width for row in runner._launched[0].plan.rows)
        began_s = time.perf_counter()
        result = collect()
        left_s = SECONDS + TOKEN_SECONDS * tokens - (time.perf_counter() - began_s)
        if left_s > 0:
            time.sleep(left_s)
        return msgspec.structs.replace(result, elapsed_s=time.perf_counter() - began_s)

    runner.collect = collect_paced  # type: ignore[method-assign]
