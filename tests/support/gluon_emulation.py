"""A Gluon kernel's own text on a CPU: each partition a thread, barriers with their phases, copies that arrive
late. Layouts mean nothing here, and order between threads is what barriers make of it.

Names that kernels import from gluon_names.py are replaced, in the kernel and in what it calls.
"""

import threading
import time
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import torch
import triton

_PATIENCE_S = 20


class Pointer:
    """A flat tensor and an offset, or offsets."""

    def __init__(self, flat: torch.Tensor, at: Any = 0) -> None:
        self.flat, self.at = flat, at
        self.dtype = types.SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.flat, self.at + more)


class Boxes:
    """Rows that boxes of so many are copied from: whole, or with `columns` so many of each, where what lies
    past the last row or column is zero."""

    def __init__(self, flat: torch.Tensor, rows: int, columns: int = 0) -> None:
        self.flat, self.rows, self.columns, self.dtype = flat, rows, columns, flat.dtype

    def cut(self, at: Any) -> torch.Tensor:
        first, left = int(at[0]), int(at[1])
        if not self.columns:
            assert 0 <= first <= len(self.flat) - self.rows, "a box outside of what there is"
            return self.flat[first : first + self.rows]
        assert 0 <= left < self.flat.shape[1] and 0 <= first < len(self.flat)
        found = torch.zeros(self.rows, self.columns, dtype=self.dtype)
        there = self.flat[first : first + self.rows, left : left + self.columns]
        found[: there.shape[0], : there.shape[1]] = there
        return found


class Bits(torch.Tensor):
    """A tensor that can be read as another type, as a kernel's can."""

    def to(self, *arguments: Any, bitcast: bool = False, **more: Any) -> torch.Tensor:
        return self.contiguous().view(*arguments) if bitcast else super().to(*arguments, **more)


class Shared:
    """Shared memory; unwritten, it is NaN, or the largest integer."""

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def index(self, i: Any) -> "Shared":
        return Shared(self.held[int(i)])

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.held.permute(order))

    def load(self, layout: object) -> torch.Tensor:
        return self.held.clone().as_subclass(Bits)

    def store(self, values: torch.Tensor) -> None:
        self.held.copy_(values)


class Barrier:
    """Passes a phase when so many arrived and all announced bytes came."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.missing = self.bytes = self.phase = 0

    def came(self, arrivals: int, bytes_: int) -> None:
        with self.changed:
            self.missing -= arrivals
            self.bytes += bytes_
            assert self.missing >= 0
            if self.missing == 0 and self.bytes == 0:
                self.phase, self.missing = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            passed = self.changed.wait_for(lambda: self.phase & 1 != parity, _PATIENCE_S)
        assert passed, "deadlock"


class Barriers:
    def __init__(self, count: int) -> None:
        self.each = [Barrier() for _ in range(count)]

    def index(self, i: Any) -> Barrier:
        return self.each[int(i)]


class _Mbarrier:
    MBarrierLayout = Barrier

    @staticmethod
    def init(barrier: Barrier, count: int) -> None:
        barrier.count = barrier.missing = count

    @staticmethod
    def arrive(barrier: Barrier, count: int = 1) -> None:
        barrier.came(count, 0)

    @staticmethod
    def expect(barrier: Barrier, bytes_: int) -> None:
        barrier.came(1, bytes_)

    @staticmethod
    def wait(barrier: Barrier, parity: Any, pred: Any = True) -> None:
        if pred:
            barrier.wait(int(parity))


def _where(condition: Any, one: Any, other: Any) -> Any:
    if not torch.is_tensor(condition) or condition.dim() == 0:
        return one if condition else other
    dtype = one.dtype if torch.is_tensor(one) else other.dtype
    return torch.where(
        condition, torch.as_tensor(one, dtype=dtype), torch.as_tensor(other, dtype=dtype)
    )


def _loaded(
    pointer: Pointer, mask: Any = None, other: float = 0.0, cache_modifier: str = ""
) -> torch.Tensor:
    at = torch.as_tensor(pointer.at)
    if mask is None:
        return pointer.flat[at]
    found: torch.Tensor = _where(mask, pointer.flat[torch.where(mask, at, 0)], other)
    return found


def _store(pointer: Pointer, values: Any, mask: torch.Tensor | None = None) -> None:
    if mask is None:
        pointer.flat[pointer.at] = values
        return
    wanted = mask.expand_as(pointer.at)
    pointer.flat[pointer.at[wanted]] = values[wanted]


def _exchanged(pointer: Pointer, value: int, sem: str) -> None:
    pointer.flat[pointer.at] = value


def _increased(pointer: Pointer, value: int, sem: str) -> int:
    pointer.flat[pointer.at] += value
    return int(pointer.flat[pointer.at]) - value


def _allocated(dtype: Any, extents: list[int], layout: object) -> Shared | Barriers:
    if isinstance(layout, Barrier):
        return Barriers(extents[0])
    unwritten = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    return Shared(torch.full(extents, unwritten, dtype=dtype))


def _specialized(parts: Sequence[tuple[Callable[..., None], Any]], *_: object) -> None:
    with ThreadPoolExecutor(len(parts)) as pool:
        for running in [pool.submit(part, *arguments) for part, arguments in parts]:
            running.result()


def _multiplied(
    x: torch.Tensor, shared: Shared, acc: torch.Tensor, *, use_acc: bool = True, is_async: bool
) -> torch.Tensor:
    found = x.float() @ shared.held.float()
    return found + acc if use_acc else found


def _smaller(x: Any, y: Any) -> torch.Tensor:
    return torch.minimum(torch.as_tensor(x), torch.as_tensor(y))


def _larger(x: Any, y: Any) -> torch.Tensor:
    return torch.maximum(torch.as_tensor(x), torch.as_tensor(y))


def _language(program: int, programs: int) -> types.SimpleNamespace:
    plain = {
        name: lambda *arguments: arguments
        for name in ("NVMMADistributedLayout", "DotOperandLayout", "BlockedLayout", "SliceLayout",
                     "NVMMASharedLayout", "DistributedLinearLayout")
    }  # fmt: skip
    return types.SimpleNamespace(
        **plain, constexpr=lambda x: x, int64=torch.int64, int32=torch.int32, int16=torch.int16,
        float32=torch.float32, float16=torch.float16, exp=torch.exp, rsqrt=torch.rsqrt,
        reshape=torch.reshape, permute=torch.permute, join=lambda x, y: torch.stack((x, y), -1),
        broadcast=torch.broadcast_tensors, atomic_xchg=_exchanged, atomic_add=_increased,
        program_id=lambda axis: torch.tensor(program), num_programs=lambda axis: programs,
        static_range=range, minimum=_smaller, maximum=_larger, where=_where, exp2=torch.exp2,
        arange=lambda low, high, layout: torch.arange(low, high),
        max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis),
        zeros=lambda extents, dtype, layout: torch.zeros(extents, dtype=dtype),
        full=lambda extents, value, dtype, layout: torch.full(extents, value, dtype=dtype),
        convert_layout=lambda x, layout, assert_trivial=False: x, cdiv=lambda x, y: (x + y - 1) // y,
        load=_loaded, store=_store, allocate_shared_memory=_allocated,
        warp_specialize=_specialized,
    )  # fmt: skip


def _functions(kernel: Any, found: dict[str, Any]) -> dict[str, Any]:
    """A kernel and what it calls, by their names."""
    found[kernel.fn.__name__] = kernel
    for name, held in kernel.fn.__globals__.items():
        if isinstance(held, type(kernel)) and name not in found:
            _functions(held, found)
    return found


def run(
    kernel: Any, programs: int, arguments: Sequence[Any], seed: int = 0, **instead: Any
) -> None:
    """A grid of one dimension, one program after the other. instead: functions by their names in the kernel."""
    chance = Random(seed)

    def copied(boxes: Boxes, at: Any, barrier: Barrier, target: Shared) -> None:
        source = boxes.cut(at)

        def arrive() -> None:
            time.sleep(chance.random() * 5e-4)
            target.held.copy_(source)
            barrier.came(0, -source.numel() * source.element_size())

        threading.Thread(target=arrive, daemon=True).start()

    def awaited(pending: int, deps: Sequence[Any]) -> tuple[Any, ...]:
        time.sleep(chance.random() * 5e-4)
        return tuple(deps)

    for program in range(programs):
        names = {
            **kernel.fn.__globals__, "triton": triton, "gl": _language(program, programs),
            "mbarrier": _Mbarrier, "load_box": copied, "barrier": lambda: None,
            "fence_async_shared": lambda: None,
            "warpgroup_mma": _multiplied, "warpgroup_mma_wait": awaited,
        }  # fmt: skip
        for name, held in _functions(kernel, {}).items():
            names[name] = types.FunctionType(held.fn.__code__, names, name, held.fn.__defaults__)
        names.update(instead)
        names[kernel.fn.__name__](*arguments)
