"""Makes a kernel's key in Triton's cache independent of the order of launches.

Delete this workaround with the support for Triton before 3.9.

Up to Triton 3.8, the key of a function contains the constants of a function it calls only if that one was
hashed before (`DependenciesFinder._update_hash` in runtime/jit.py). So the order in which a process launches
its kernels decides which cache entries it hits. Here all functions are hashed bottom-up.
"""

import sys
from functools import lru_cache
from types import ModuleType

from triton.runtime.jit import JITFunction

_KERNELS = "localchat_cuda.kernels"


@lru_cache(maxsize=1)
def hash_bottom_up() -> None:
    """Hash all imported kernels, callees first. Call once per process, before the first launch.

    It takes 60 ms."""
    seen: set[int] = set()
    for name in sorted(name for name in sys.modules if name.startswith(_KERNELS)):
        for value in list(vars(sys.modules[name]).values()):
            _visit(value, seen)


def _visit(value: object, seen: set[int]) -> None:
    if not isinstance(value, JITFunction) or id(value) in seen:
        return
    seen.add(id(value))
    names = value.fn.__code__.co_names
    for name in names:
        callee = value.fn.__globals__.get(name)
        _visit(callee, seen)
        if isinstance(callee, ModuleType):
            for attribute in names:
                _visit(getattr(callee, attribute, None), seen)
    # Reading the property computes the key and caches it.
    value.cache_key  # noqa: B018
