"""Triton's interpreter without its repeated work, so that tests of kernels take half their time."""

import inspect
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def speed_up() -> None:
    """Replace the language's functions once a launch, not once a call of a device function, and look
    dtypes up in one table. What is computed stays the interpreter's own."""
    _patch_once_a_launch(interpreter)
    _tabulate_dtypes(interpreter)


def _patch_once_a_launch(interpreter: Any) -> None:
    patch_whole, open_scopes = interpreter._patch_lang, list[tuple[set[str], Any]]()

    @cache
    def languages(fn: Any) -> frozenset[str]:
        modules = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
        return frozenset(module.__name__ for module in modules if module in (tl, tl.core))

    def patch_lang(fn: Any) -> Any:
        if not open_scopes:
            scope = patch_whole(fn)
            restore = scope.restore

            def close() -> None:
                open_scopes.clear()
                restore()

            scope.restore = close
            open_scopes.append((set(languages(fn)), scope))
            return scope
        # A device function: the interpreter does not restore what this replaces.
        patched, scope = open_scopes[-1]
        if not languages(fn) <= patched:
            scope._changes += patch_whole(fn)._changes
            patched |= languages(fn)
        return scope

    interpreter._patch_lang = patch_lang


def _tabulate_dtypes(interpreter: Any) -> None:
    find, known = interpreter._get_np_dtype, dict[str, np.dtype[Any]]()

    def dtype_of(type_: Any) -> np.dtype[Any]:
        if isinstance(type_, (tl.pointer_type, tl.block_type)):
            element = getattr(type_, "element_ty", None)
            if isinstance(type_, tl.pointer_type) or isinstance(element, tl.pointer_type):
                return np.dtype(np.uint64)
            type_ = element
        found = known.get(type_.name)
        if found is None:
            found = known[type_.name] = find(type_)
        return found

    interpreter._get_np_dtype = dtype_of
