"""What every launcher of this folder needs: how a kernel may be launched on a device, and the
checks that refuse a wrong tensor by its argument's name.

PDL is programmatic dependent launch: a kernel may begin while its predecessor in the stream still
runs, loads its own weights, and waits for the predecessor's results only before it touches them. In
our chains it saves about 1 us for each kernel on an H200. Every kernel here that is launched with
it does the same three things in this order: release its own dependents, load what no other kernel
writes, wait.
"""

import ctypes
from functools import lru_cache
from typing import NamedTuple

import torch
import triton

MAX_INT32 = 2**31 - 1


class Traits(NamedTuple):
    """How kernels are launched on a device. `asm`: inline PTX may be used (never in the
    interpreter). `pdl`: programmatic dependent launch (compute capability 9 and later). `sms`:
    multiprocessors. `capability`: compute capability, (0, 0) of the interpreter."""

    asm: bool
    pdl: bool
    sms: int
    capability: tuple[int, int] = (0, 0)

    @staticmethod
    def of(capability: tuple[int, int], sms: int) -> "Traits":
        """Of a GPU."""
        return Traits(True, capability >= (9, 0), sms, capability)

    @property
    def hopper(self) -> bool:
        """Whether it has the instructions that only compute capability 9 has: wgmma, and copies of boxes."""
        return self.capability[0] == 9

    @property
    def fp8(self) -> bool:
        """Whether it converts and multiplies e4m3 itself: compute capability 8.9 and later."""
        return self.capability >= (8, 9)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1), on a CPU."""
    return bool(triton.knobs.runtime.interpret)


@lru_cache(maxsize=16)
def _traits_of_cuda(index: int) -> Traits:
    properties = torch.cuda.get_device_properties(index)
    return Traits.of((properties.major, properties.minor), properties.multi_processor_count)


_imagined: list[Traits] = []


def imagine(gpu: Traits) -> None:
    """From here on, tensors without memory (device `meta`) stand for those of such a GPU, for all of this
    process: launches upon them are to be compiled, and cannot run (rehearsal.py)."""
    _imagined[:] = [gpu]


def traits(device: torch.device) -> Traits:
    """The launch traits of a device; a CPU stands for the interpreter."""
    if device.type == "cuda" and not interpreted():
        return _traits_of_cuda(
            torch.cuda.current_device() if device.index is None else device.index
        )
    if device.type == "meta" and _imagined:
        return _imagined[0]
    return Traits(False, False, 4)


def options(pdl: bool, warps: int, *, stages: int = 0, registers: int = 0) -> dict[str, int | bool]:
    """Launch options of Triton; those left at 0 keep its default."""
    found: dict[str, int | bool] = {"num_warps": warps}
    if stages:
        found["num_stages"] = stages
    if registers and not interpreted():
        found["maxnreg"] = registers
    if pdl:
        found["launch_pdl"] = True
    return found


CARVEOUT_PERCENT = 14
"""Shared memory's part of each multiprocessor's 256 KB, for the kernels of a decode step of few
rows."""

_PREFERRED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT


@lru_cache(maxsize=4096)
def _prefer_carveout(function: int, percent: int) -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuFuncSetAttribute(ctypes.c_void_p(function), _PREFERRED_CARVEOUT, percent)
    if status:
        raise RuntimeError(f"cuFuncSetAttribute: CUDA error {status}")


CARVEOUT_ROWS = 16
"""Products of more rows than that live in shared memory: with 14 % a step of 64 took 4.40 ms, not 3.47."""


def own_carveout(rows: int) -> bool:
    """Whether kernels of a step of so many rows leave the carve-out to the driver. A kernel of all steps
    takes this as a constant that it never reads: it is then two functions, each with its own carve-out."""
    return rows > CARVEOUT_ROWS


def set_carveout(kernel: object, rows: int = 1) -> None:
    """Give a launched kernel the carve-out that its neighbours in a step of so many rows have. The driver
    picks one for each kernel from its own need, and a multiprocessor seems to drain before it changes: with
    attention among the products, that cost 15 % of a decode step of 1 to 8 rows. Takes effect from the
    kernel's next launch on, so a first launch comes before a graph is captured. `kernel` is what Triton's
    launch returns (None in the interpreter)."""
    function = getattr(kernel, "function", None)
    if function and not own_carveout(rows):
        _prefer_carveout(function, CARVEOUT_PERCENT)


def require(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device | None = None,
    *,
    contiguous: bool = True,
) -> None:
    """Raise ValueError that names the argument unless the tensor is as the kernel reads it.

    `shape`: None stands for any extent. `device`: where it must be, None for anywhere.
    `contiguous`: False asks only that the last dimension is dense.
    """
    found = tuple(tensor.shape)
    fits = len(found) == len(shape) and all(
        wanted is None or wanted == extent for wanted, extent in zip(shape, found, strict=True)
    )
    if not fits:
        wanted_text = "x".join("*" if extent is None else str(extent) for extent in shape)
        raise ValueError(f"{name}: shape {wanted_text} wanted, {'x'.join(map(str, found))} given")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: {' or '.join(map(str, dtypes))} wanted, {tensor.dtype} given")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: on {device} wanted, on {tensor.device} given")
    dense = tensor.is_contiguous() if contiguous else (tensor.dim() == 0 or tensor.stride(-1) == 1)
    if not dense:
        raise ValueError(f"{name}: {'contiguous' if contiguous else 'dense last dimension'} wanted")
    if tensor.numel() > MAX_INT32:
        raise ValueError(
            f"{name}: {tensor.numel()} elements are more than a kernel's offsets can reach"
        )


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least `value` (1 for 0)."""
    return 1 << max(value - 1, 0).bit_length()
