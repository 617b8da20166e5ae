"""Plans a load on several GPUs. Imports no torch.

It chooses their number, and plans the memory of one of them. All GPUs store the same number of bytes, so the
one with the least free memory decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from localchat.errors import UsageError
from localchat.fit.hardware import Gpu
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat.model_files.safetensors import SafetensorsHeader
from localchat.units import size, tokens
from localchat_cuda.config.model import ModelConfig
from localchat_cuda.plan import memory_plan
from localchat_cuda.plan.draft_plan import DraftShape
from localchat_cuda.ranks.split import MAX_RANKS, possible_ranks, split_config


@dataclass(frozen=True, slots=True)
class RankLoad:
    """A request to load a model on some of these GPUs."""

    name: str
    config: ModelConfig
    """Shape of the whole model."""
    headers: tuple[SafetensorsHeader, ...]
    options: LoadOptions
    gpus: Sequence[Gpu]
    """GPUs that may compute, the one for a load on one GPU first."""
    ram_bytes: int = 0
    draft: DraftShape | None = None

    def plan(self) -> MemoryPlan:
        """Plan the load. Raises UsageError for a number of GPUs that is not possible."""
        count = self.options.gpus
        if count == "auto":
            return self._smallest()
        if count > max(1, len(self.gpus)):
            usable = f"{len(self.gpus)} NVIDIA GPUs are usable"
            if len(self.gpus) == 1:
                usable = "one NVIDIA GPU is usable"
            raise UsageError(
                f"--gpus {count} is not possible: {usable} here.",
                hint="Use --gpus auto, which takes as many as the model needs.",
            )
        plan = self.on(count)
        if count > 1:
            return plan
        return replace(plan, notes=(*plan.notes, *self._advice(plan)))

    def on(self, count: int) -> MemoryPlan:
        """Plan the load on the first `count` GPUs. Raises UsageError if the model cannot be divided so."""
        part = split_config(self.config, count, self.name)
        if count > 1 and self.draft is not None and self.draft.reads_states:
            raise UsageError(
                f"{self.draft.name}, an {self.draft.kind}, cannot draft for a model on several GPUs.",
                hint="Use a draft model, or one GPU (--gpus 1).",
            )
        gpu = min(self.gpus[:count], key=lambda gpu: gpu.free_bytes)
        plan = memory_plan.plan(
            part, self.headers, self.options, gpu, self.ram_bytes, self.draft, self.config
        )
        if count == 1:
            return plan
        note = f"{count} GPUs compute together. The sizes here are those of each one."
        return replace(plan, gpus=count, notes=(note, *plan.notes))

    def _smallest(self) -> MemoryPlan:
        """Return the plan with the fewest GPUs that fit the requested or trained context."""
        context = self.options.context_tokens or self.config.context_train
        best: MemoryPlan | None = None
        for count in self._counts():
            plan = self.on(count)
            if plan.fits and plan.context_tokens >= context:
                return plan
            if best is None or (plan.fits, plan.context_tokens) > (best.fits, best.context_tokens):
                best = plan
        assert best is not None
        return best

    def _counts(self) -> tuple[int, ...]:
        limit = min(len(self.gpus), MAX_RANKS)
        if self.draft is not None and self.draft.reads_states:
            limit = 1
        return tuple(n for n in possible_ranks(self.config) if n <= max(1, limit))

    def _advice(self, plan: MemoryPlan) -> list[str]:
        """Say what more GPUs bring."""
        for count in self._counts()[1:2]:
            more = self.on(count)
            gain = f"room for {tokens(more.kv_tokens)} instead of {tokens(plan.kv_tokens)}"
            if not more.fits:
                gain = "still too little memory"
            elif not plan.fits:
                gain = f"the model fits with {tokens(more.context_tokens)} of context"
            return [f"With --gpus {count}: {size(more.weights_bytes)} of weights on each, {gain}."]
        return []
