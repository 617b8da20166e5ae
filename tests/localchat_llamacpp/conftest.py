"""Tiny models, written once per run, and a driver that makes plans for a runner."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from localchat.backend_api.interface import LoadRequest
from localchat.fit.load_options import LoadOptions
from localchat_llamacpp.load import Target, load_runner
from localchat_llamacpp.runner import LlamaCppRunner
from tests.support.llamacpp_driver import Driver, Start, plan_of
from tests.support.llamacpp_models import write_gemma3, write_llama, write_mamba

WRITERS = {"llama": write_llama, "gemma3": write_gemma3, "mamba": write_mamba}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Path of each tiny model by architecture."""
    folder = tmp_path_factory.mktemp("models")
    return {name: write(folder / f"{name}.gguf") for name, write in WRITERS.items()}


@pytest.fixture
def start(models: dict[str, Path]) -> Iterator[Start]:
    """start("llama", context=512, ...) -> a driver over a fresh runner; closed after the test."""
    runners: list[LlamaCppRunner] = []

    def begin(
        name: str = "llama",
        *,
        context: int = 1024,
        step: int = 64,
        slots: int = 4,
        kv_type: str = "f16",
        flash: bool = False,
        window_only: bool = False,
        says: Sequence[str] | None = None,
        gpu_layers: int = 0,
        threads: int = 1,
        architecture: str = "",
        draft: str | None = None,
        head: bool = False,
    ) -> Driver:
        plan = plan_of(context, step, kv_type, flash)
        options = LoadRequest(
            replace(plan, gpu_layers=gpu_layers, window_only=window_only, prediction_head=head),
            LoadOptions(max_slots=slots, draft=str(models[draft]) if draft else None),
            safe_mode=not head,
        )
        size = models[name].stat().st_size
        target = Target(models[name], size, ("f16",), threads, architecture)
        said = says if isinstance(says, list) else []
        runner = load_runner(target, options, lambda done, total: True, said.append)
        runners.append(runner)
        return Driver(runner)

    yield begin
    for runner in runners:
        runner.close()
