"""The reference backend with two ranks for every model: what the contract suite runs over."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat_cuda.backend import ReferenceBackend
from localchat_cuda.checkpoint_model import CheckpointModel


class _TwoRankModel(CheckpointModel):
    def plan(self, options: LoadOptions) -> MemoryPlan:
        return super().plan(msgspec.structs.replace(options, gpus=2))


class TwoRankBackend(ReferenceBackend):
    """See ReferenceBackend."""

    name = "cuda-two-ranks"

    def open(self, path: Path, notify: Callable[[str], None]) -> CheckpointModel:
        return _TwoRankModel(path, "cpu", notify)
