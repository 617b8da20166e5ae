"""Makes a kernel's key in Triton's cache independent of the order of launches.

A module of its own: a workaround for Triton, to be deleted with support for versions before 3.9.

Up to Triton 3.8 the key of a function holds the constants of those that it calls only where these were hashed
before (`DependenciesFinder._update_hash` in runtime/jit.py; 3.9 hashes them first). So the order in which a
process launches its kernels decides what it finds in the cache. Here all are hashed bottom-up.
"""

import sys
from functools import lru_cache
from types import ModuleType

from triton.runtime.jit import JITFunction

_KERNELS = "localchat_cuda.kernels"


@lru_cache(maxsize=1)
def hash_bottom_up() -> None:
    """Hash all kernels that are imported by now, callees first. Takes 60 ms, once in a process; call it before
    the first launch."""
    seen: set[int] = set()
    for name in sorted(each for each in sys.modules if each.startswith(_KERNELS)):
        for value in list(vars(sys.modules[name]).values()):
            _visit(value, seen)


def _visit(value: object, seen: set[int]) -> None:
    if not isinstance(value, JITFunction) or id(value) in seen:
        return
    seen.add(id(value))
    names = value.fn.__code__.co_names
    known = value.fn.__globals__
    for name in names:
        found = known.get(name)
        _visit(found, seen)
        if isinstance(found, ModuleType):
            for attribute in names:
                _visit(getattr(found, attribute, None), seen)
    value.cache_key  # noqa: B018 (computes and caches it)
