"""Triton's interpreter without its repeated work, so that tests of kernels take half their time."""

import inspect
import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def speed_up() -> None:
    """Replace the language's functions once a launch, not once a call of a device function, and look
    dtypes, types of blocks and shapes up in tables. What is computed stays the interpreter's own."""
    if not triton.knobs.runtime.interpret:
        return
    _patch_once_a_launch(interpreter)
    _tabulate_dtypes(interpreter)
    _tabulate_blocks()
    # It computes every integer sum twice, for an assertion that is left out unless `debug` is set.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


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


def _tabulate_blocks() -> None:
    """One type of blocks for each element and shape, and one shape of a tensor: neither is ever changed."""
    block, constant, shape_of = tl.block_type, tl.constexpr, tl.core.tuple
    broadcast = TritonSemantic.broadcast_impl_value
    blocks, shapes = dict[Any, Any](), dict[Any, Any]()

    def with_element_type(self: Any, element: Any) -> Any:
        key = element.name, *self.shape.values
        found = blocks.get(key)
        if found is None:
            found = blocks[key] = block(element, self.shape)
        return found

    def begin(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 (the name that it replaces)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        key = (*type.shape.values,) if type.is_block() else ()
        found = shapes.get(key)
        if found is None:
            whole = shape_of([constant(each) for each in key])
            found = shapes[key] = constant(math.prod(key)), whole
        self.numel, self.shape = found

    def broadcast_unlike(self: Any, left: Any, right: Any) -> Any:
        one, other = left.type, right.type
        if one.is_block() and other.is_block() and one.shape.values == other.shape.values:
            return left, right
        return broadcast(self, left, right)

    TritonSemantic.broadcast_impl_value = broadcast_unlike
    tl.tensor.__init__ = begin
    block.with_element_ty = with_element_type
    block.to_ir = lambda self, builder: with_element_type(self, self.element_ty.to_ir(builder))
