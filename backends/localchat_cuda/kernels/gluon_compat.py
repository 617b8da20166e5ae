"""Gluon functions under one name for all supported Triton versions.

Gluon is Triton's lower level, with explicit layouts, shared memory, barriers and warps. Its names change
between versions (3.6 has `thread_barrier` and `tma.async_copy_global_to_shared` where 3.9 has `barrier` and
`tma.async_load`). Importing this module raises ImportError if something is missing; modules with another kernel
catch it once, at import.
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
    """Return the first of these attributes that the module has; ImportError if it has none."""
    for name in names:
        if hasattr(module, name):
            function: Callable[..., Any] = getattr(module, name)
            return function
    raise ImportError(f"this Triton's Gluon has none of {', '.join(names)}")


barrier = _one_of(gl, "barrier", "thread_barrier")
"""Synchronizes the threads of a partition."""
load_box = _one_of(tma, "async_load", "async_copy_global_to_shared")
"""Copies a box of a tensor into shared memory; a barrier counts its bytes."""
_one_of(gl, "warp_specialize")
