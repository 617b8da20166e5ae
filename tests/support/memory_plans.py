"""Shared by tests: PLAN."""

from localchat.fit.memory_plan import MemoryPlan

GB = 10**9


PLAN = MemoryPlan(
    backend="llama.cpp",
    weights_bytes=4 * GB,
    kv_bytes=2 * GB,
    compute_bytes=GB,
    overhead_bytes=GB,
    free_bytes=10 * GB,
    fits=True,
    context_tokens=8192,
    max_context_tokens=16384,
    kv_type="f16",
    flash_attention=False,
    gpu_layers=0,
    cache_ram_bytes=0,
    max_step_tokens=128,
)
