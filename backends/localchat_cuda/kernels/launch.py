"""Launches of kernels, traits of devices, and argument checks that name the wrong tensor.

PDL is programmatic dependent launch: a kernel may begin while its predecessor in the stream still
runs, loads its own weights, and waits for the predecessor's results only before it reads them. In
our chains it saves about 1 us for each kernel on an H200. Every kernel here that is launched with
it does the same three things in this order: `release` its own dependents, load data that no other
kernel writes, `wait`.
"""

import ctypes
from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_INT32 = 2**31 - 1


class Traits(NamedTuple):
    """Properties of a device that decide how kernels are launched."""

    asm: bool
    """Inline PTX may be used; False in the interpreter."""
    pdl: bool
    """Programmatic dependent launch: compute capability 9 and later."""
    sms: int
    """Multiprocessors."""
    capability: tuple[int, int] = (0, 0)
    """Compute capability; (0, 0) in the interpreter."""
    safe: bool = False
    """Only what every supported GPU does alike: no PDL, and no kernel in Gluon."""

    @staticmethod
    def of(capability: tuple[int, int], sms: int, *, safe: bool = False) -> "Traits":
        """Return the traits of a GPU."""
        return Traits(True, capability >= (9, 0) and not safe, sms, capability, safe)

    @property
    def hopper(self) -> bool:
        """Whether kernels may use what only compute capability 9 has: wgmma and TMA box copies."""
        return self.capability[0] == 9 and not self.safe

    @property
    def roomy(self) -> bool:
        """Whether a program may take 227 KB of shared memory: compute capabilities 9 and 10."""
        return self.capability[0] in (9, 10) and not self.safe

    @property
    def fp8(self) -> bool:
        """Whether the GPU converts and multiplies e4m3 natively: compute capability 8.9 and later."""
        return self.capability >= (8, 9)


@lru_cache(maxsize=1)
def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter (TRITON_INTERPRET=1), on a CPU."""
    return bool(triton.knobs.runtime.interpret)


@lru_cache(maxsize=16)
def _traits_of_cuda(index: int, safe: bool) -> Traits:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    return Traits.of(capability, properties.multi_processor_count, safe=safe)


_safe: list[bool] = []


def set_safe_mode(on: bool) -> None:
    """Turn PDL and Gluon kernels off, or on again, for this process.

    Call it before the first launch. A process loads one model.
    """
    _safe[:] = [on]


_imagined: list[Traits] = []


def imagine(gpu: Traits) -> None:
    """Make tensors without memory (device `meta`) stand for tensors of such a GPU.

    For the rest of this process. Launches on them are only compiled and cannot run (compile_ahead/trace.py).
    """
    _imagined[:] = [gpu]


def traits(device: torch.device) -> Traits:
    """Return the launch traits of a device; a CPU stands for the interpreter."""
    if device.type == "cuda" and not interpreted():
        index = torch.cuda.current_device() if device.index is None else device.index
        return _traits_of_cuda(index, any(_safe))
    if device.type == "meta" and _imagined:
        return _imagined[0]
    return Traits(False, False, 4)


@triton.jit
def release(PDL: tl.constexpr):
    """Let the dependents of a kernel begin."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait for the results of the predecessor."""
    if PDL:
        gdc_wait()


class KernelLaunch(NamedTuple):
    """A launch of a kernel with PDL, where the GPU has it."""

    kernel: Any
    """A function of Triton, which has no types."""
    grid: tuple[int, ...]
    gpu: Traits
    warps: int
    registers: int = 0
    """Register limit for the compiler; 0: none."""
    rows: int = 0
    """Rows of a step whose carve-out the kernel takes (`set_carveout`); 0: the driver chooses it."""

    def run(self, *arguments: object, **constants: object) -> None:
        """Launch the kernel. Do not pass PDL, nor ROOMY (`own_carveout`) if it comes before PDL."""
        kernel, grid, gpu, warps, registers, rows = self
        constants["num_warps"] = warps
        constants["PDL"] = gpu.pdl
        if gpu.pdl:
            constants["launch_pdl"] = True
        if registers and gpu.asm:
            constants["maxnreg"] = registers
        if kernel.arg_names[-2] == "ROOMY":
            constants["ROOMY"] = own_carveout(rows)
        compiled = _launch(kernel, grid, arguments, constants, carved=0 < rows <= CARVEOUT_ROWS)
        if rows and compiled is not None:
            set_carveout(compiled, rows)


def launch_kernel(
    kernel: Any,  # noqa: ANN401 (a function of Triton, which has no types)
    grid: tuple[int, ...],
    *arguments: object,
    **constants: object,
) -> None:
    """Launch a kernel without PDL on the current stream. `constants`: also Triton's options."""
    _launch(kernel, grid, arguments, constants)


class LoadedKernel(NamedTuple):
    """A compiled kernel that the GPU has loaded."""

    kernel: Any
    """Triton's kernel, which owns the function."""
    run: Callable[..., None]
    function: int
    metadata: object
    constants: tuple[object, ...]
    """Values of the constants, in the order of the kernel's parameters."""


_loaded: dict[Hashable, LoadedKernel] = {}
"""Kernels by all that Triton compiles variants for."""


def _launch(
    kernel: Any,  # noqa: ANN401
    grid: tuple[int, ...],
    arguments: tuple[object, ...],
    constants: dict[str, object],
    *,
    carved: bool = False,
) -> Any:  # noqa: ANN401
    """Launch a kernel. Return Triton's compiled kernel if it is the first launch, else None.

    Triton finds a compiled kernel by a text of all arguments and options, which takes much of the host's time
    for a step without a graph. The key here is cheaper. `carved`: a function with the carve-out of decode
    kernels."""
    if interpreted() or _imagined:
        return kernel[grid](*arguments, **constants)
    # Constants are the last parameters of all kernels.
    first = kernel.constexprs[0]
    values: list[object] = []
    variant = _variant(arguments[:first], values)
    if variant is None:
        return kernel[grid](*arguments, **constants)
    fixed = arguments[first:]
    key = (id(kernel), carved, variant, fixed, *constants, *constants.values())
    loaded = _loaded.get(key)
    if loaded is None:
        compiled = kernel[grid](*arguments, **constants)
        names = kernel.arg_names[len(arguments) :]
        _loaded[key] = LoadedKernel(
            compiled,
            compiled.run,
            compiled.function,
            compiled.packed_metadata,
            (*fixed, *(constants[name] for name in names)),
        )
        return compiled
    active = triton.runtime.driver.active
    stream = active.get_current_stream(active.get_current_device())
    x, y, z = (*grid, 1, 1)[:3]
    _, run, function, metadata, final = loaded
    # Neither metadata of this launch nor hooks, which serve Triton's profiler.
    run(x, y, z, stream, function, metadata, None, None, None, *values, *final)
    return None


def _variant(arguments: Iterable[Any], values: list[object]) -> tuple[object, ...] | None:
    """Return the key of a kernel's variant, and append the launcher's arguments to `values`.

    Triton compiles variants for data types, for addresses in multiples of 16, and for integers that are 1,
    multiples of 16, or longer than 32 bits. Returns None for arguments of other kinds."""
    traits: list[object] = []
    for argument in arguments:
        value = argument
        if isinstance(argument, torch.Tensor):
            # The launcher takes an address as it is, and asks the driver about a tensor.
            value = argument.data_ptr()
            traits.append((argument.dtype, value % 16 == 0))
        elif type(argument) is int:
            traits.append((argument == 1, argument % 16 == 0, abs(argument) <= MAX_INT32))
        elif isinstance(argument, tuple):
            items: list[object] = []
            traits.append(_variant(argument, items))
            if traits[-1] is None:
                return None
            value = tuple(items)
        elif argument is None or isinstance(argument, bool | float):
            traits.append(type(argument))
        elif hasattr(argument, "block_shape"):
            # Tensor descriptor of Gluon.
            traits.append((argument.base.dtype, *argument.block_shape, argument.layout))
        else:
            return None
        values.append(value)
    return tuple(traits)


def cdiv(dividend: int, divisor: int) -> int:
    """Return the quotient, rounded up. Triton's function takes the host several microseconds."""
    return -(-dividend // divisor)


def row_warps(columns: int) -> int:
    """Return the warps of a program that keeps a whole row in registers."""
    return 8 if columns > 1024 else 4


def tensor_or(tensor: torch.Tensor | None, placeholder: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a placeholder for a kernel argument that this variant does not read."""
    return placeholder if tensor is None else tensor


CARVEOUT_PERCENT = 14
"""Shared memory of each multiprocessor for decode kernels with few rows, of 256 KB."""

_PREFERRED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT


@lru_cache(maxsize=4096)
def _prefer_carveout(function: int, percent: int) -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuFuncSetAttribute(ctypes.c_void_p(function), _PREFERRED_CARVEOUT, percent)
    if status:
        raise RuntimeError(f"cuFuncSetAttribute: CUDA error {status}")


CARVEOUT_ROWS = 16
"""Gemms with more rows need the shared memory: with 14 % a step of 64 took 4.40 ms, not 3.47."""


def own_carveout(rows: int) -> bool:
    """Return whether kernels of a step of `rows` rows leave the carve-out to the driver.

    A kernel used in all steps takes this as a constant that it never reads: it is then compiled to two
    functions, each with its own carve-out.
    """
    return rows > CARVEOUT_ROWS


def set_carveout(kernel: object, rows: int = 1) -> None:
    """Give a launched kernel the carve-out of the other kernels in a step of `rows` rows.

    The driver picks one for each kernel from its own need, and a multiprocessor seems to drain before it
    changes: with attention between the gemms, that cost 15 % of a decode step of 1 to 8 rows. Measured on
    compute capability 9, whose multiprocessors have 256 KB, and left alone on others. Takes effect from
    the kernel's next launch on, so a first launch must come before a graph is captured. `kernel` is the return
    value of Triton's launch (None in the interpreter).
    """
    function = getattr(kernel, "function", None)
    if function and not own_carveout(rows) and _is_hopper(kernel):
        _prefer_carveout(function, CARVEOUT_PERCENT)


def _is_hopper(kernel: object) -> bool:
    """Whether a compiled kernel is for compute capability 9."""
    target = getattr(getattr(kernel, "metadata", None), "target", None)
    return getattr(target, "arch", 0) // 10 == 9


_trusted: list[bool] = []
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def trust_callers() -> None:
    """Check no more arguments in this process: steps come from one caller, whose shapes tests know.

    The checks are an eighth of the host's time for a step that is launched kernel by kernel.
    """
    _trusted[:] = [True]


def require(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    device: torch.device,
    *dtypes: torch.dtype,
    contiguous: bool = True,
) -> None:
    """Raise ValueError that names the argument unless the kernel can read the tensor.

    `shape`: None stands for any extent. `dtypes`: possible ones; without any, those of floating numbers.
    `contiguous`: False requires only that the last dimension is dense.
    """
    if _trusted:
        return
    actual = tuple(tensor.shape)
    fits = len(actual) == len(shape) and all(
        expected is None or expected == extent
        for expected, extent in zip(shape, actual, strict=True)
    )
    if not fits:
        expected_text = "x".join("*" if extent is None else str(extent) for extent in shape)
        raise ValueError(
            f"{name}: shape {expected_text} wanted, {'x'.join(map(str, actual))} given"
        )
    dtypes = dtypes or _FLOATS
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: {' or '.join(map(str, dtypes))} wanted, {tensor.dtype} given")
    if tensor.device != device:
        raise ValueError(f"{name}: on {device} wanted, on {tensor.device} given")
    dense = tensor.is_contiguous() if contiguous else (tensor.dim() == 0 or tensor.stride(-1) == 1)
    if not dense:
        raise ValueError(f"{name}: {'contiguous' if contiguous else 'dense last dimension'} wanted")
    if tensor.numel() > MAX_INT32:
        raise ValueError(
            f"{name}: {tensor.numel()} elements are more than a kernel's offsets can reach"
        )


def power_of_two(value: int) -> int:
    """Return the smallest power of two that is at least `value` (1 for 0)."""
    return 1 << max(value - 1, 0).bit_length()
