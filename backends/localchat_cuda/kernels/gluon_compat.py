"""What kernels written in Gluon use of it, under the names that this Triton has.

Gluon is Triton's lower level: layouts, shared memory, barriers and warps are the author's. It moves from
version to version (3.6 says `thread_barrier` and `tma.async_copy_global_to_shared` where 3.9 says `barrier`
and `tma.async_load`). Importing this raises ImportError where something is missing, and whoever has another
kernel decides then, once.
"""

from collections.abc import Callable
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "TensorDescriptor",
    "barrier",
    "fence_async_shared",
    "gl",
    "gluon",
    "load_box",
    "mbarrier",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]


def _one_of(module: object, *names: str) -> Callable[..., Any]:
    """What the module has under the first of these names that it knows."""
    for name in names:
        if hasattr(module, name):
            found: Callable[..., Any] = getattr(module, name)
            return found
    raise ImportError(f"this Triton's Gluon has none of {', '.join(names)}")


barrier = _one_of(gl, "barrier", "thread_barrier")
"""Threads of a partition meet."""
load_box = _one_of(tma, "async_load", "async_copy_global_to_shared")
"""Copy a box of a tensor into shared memory; a barrier counts its bytes."""
_one_of(gl, "warp_specialize")
