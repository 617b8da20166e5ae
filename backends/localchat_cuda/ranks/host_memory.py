"""Memory of the host blocks that all ranks map."""

import contextlib
import os
from collections.abc import Iterator

from localchat.fit.memory_plan import MemoryPlan
from localchat_cuda.config.model import PAGE_TOKENS, ModelConfig
from localchat_cuda.plan.memory_plan import kv_token_bytes
from localchat_cuda.runner.host_pages import HostMemory


def block_bytes(config: ModelConfig, plan: MemoryPlan) -> int:
    """Return the bytes of a host block, which has the parts of all ranks. `config`: of one rank."""
    return max(1, kv_token_bytes(config, plan.kv_type) * PAGE_TOKENS * config.ranks)


def block_count(config: ModelConfig, plan: MemoryPlan) -> int:
    """Return the number of host blocks."""
    return plan.cache_ram_bytes // block_bytes(config, plan)


@contextlib.contextmanager
def created(config: ModelConfig, plan: MemoryPlan) -> Iterator[int]:
    """Yield the descriptor of a memory file for the host blocks. -1: no blocks.

    `config`: of one rank. Processes keep the memory that they have mapped after the file is closed."""
    count = block_count(config, plan)
    if not count:
        yield -1
        return
    file = os.memfd_create("localchat-host-blocks")
    try:
        os.ftruncate(file, HostMemory.length_of(block_bytes(config, plan), count))
        yield file
    finally:
        os.close(file)
