"""Facts of an engine that front ends show, from the plan of its load."""

from dataclasses import replace

from localchat.core.engine_info import gpu_parts
from localchat.engine.interface import GpuPart
from localchat.fit.memory_plan import GpuShare, MemoryPlan

PLAN = MemoryPlan("cuda", 0, 10**9, 0, 0, 0, True, 4096, 4096, "f16", True, 28, 0, 512)


def test_each_of_several_gpus_has_its_part() -> None:
    assert gpu_parts(PLAN) == ()
    layers = replace(PLAN, gpu_shares=(GpuShare(15, 5, 24), GpuShare(14, 4, 12)))
    assert gpu_parts(layers) == (GpuPart(15, 5, 24), GpuPart(14, 4, 12))
    # Ranks compute every layer together.
    ranks = replace(PLAN, gpus=2, gpu_bytes=7)
    assert gpu_parts(ranks) == (GpuPart(28, 7), GpuPart(28, 7))
