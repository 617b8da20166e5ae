"""llama.cpp's backend as on a GPU, for tests on a CPU: steps begin early, and two are in flight."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from localchat.backend_api.interface import LoadRequest, OpenModel, Progress, Runner
from localchat_llamacpp.backend import LlamaCppBackend
from localchat_llamacpp.model import GgufModel


class GpuLlamaCppBackend(LlamaCppBackend):
    """Loads with all layers on GPUs, of which there are none: the build puts them into RAM."""

    def open(self, path: Path, notify: Callable[[str], None]) -> OpenModel:
        return _Model(path)


class _Model(GgufModel):
    def load(
        self, request: LoadRequest, progress: Progress, notify: Callable[[str], None]
    ) -> Runner:
        request = request._replace(plan=replace(request.plan, gpu_layers=-1))
        return super().load(request, progress, lambda sentence: None)
