"""What a door may ask of the CUDA backend, made of its own functions, where it is not installed."""

from collections.abc import Sequence
from pathlib import Path

from localchat.backends import Facts, WayOut
from localchat.errors import LocalchatError
from localchat.fit.checkpoint import Unloaded, is_checkpoint
from localchat.fit.machine import Machine, read_machine
from localchat.fit.paces import Past
from localchat.fit.plan import LoadWish, MemoryPlan
from localchat.loop.backend import Availability
from localchat_cuda import fitting


class CudaDoor:
    name = "cuda"
    kinds = fitting.KINDS

    def available(self) -> Availability:
        return Availability(True, "torch is installed.")

    def accepts(self, path: Path) -> bool:
        return is_checkpoint(path)

    def objection(self, model: Unloaded) -> str:
        return fitting.objection(model)

    def seen(self, machine: Machine) -> Machine:
        return machine

    def plan(self, model: Unloaded, wish: LoadWish, machine: Machine) -> MemoryPlan:
        return fitting.plan_for(model, wish, machine)

    def expected_rate(
        self, model: Unloaded, plan: MemoryPlan, threads: int, past: Sequence[Past] = ()
    ) -> float | None:
        return fitting.expected_rate(model, plan, read_machine(), past)

    def build_key(self) -> str:
        return ""

    def facts(self) -> Facts:
        raise LocalchatError("nothing to see")

    def ways_out(self) -> tuple[WayOut, ...]:
        return ()
