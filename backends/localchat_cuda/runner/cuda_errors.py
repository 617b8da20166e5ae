"""Classifies the errors that torch, CUDA and Triton raise."""

import torch
import triton
from triton.errors import TritonError

_MEMORY_PHRASES = (
    "out of memory",  # CUDA runtime, torch's allocator, Triton's module loader
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)
_CAPTURE_PHRASES = (
    "during capture",  # cudaErrorStreamCaptureInvalidated: something else failed before
    "stream is capturing",  # cudaErrorStreamCaptureUnsupported: the allocator freed cached blocks
    "streamcapture",
)
_FAULT_PHRASES = ("cuda error", "triton error", "passmanager::run failed", "cublas_status")


def is_device_fault(error: BaseException) -> bool:
    """Return True if the GPU, its driver or its compiler failed. Other errors are our bugs."""
    if isinstance(error, torch.AcceleratorError | TritonError):
        return True
    return isinstance(error, RuntimeError) and _says(error, _FAULT_PHRASES)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if GPU memory or pinned memory ran out.

    Only torch's allocator has a class for this error. Graphs, modules, library handles and pinned memory raise
    RuntimeError with a message."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _says(error, _MEMORY_PHRASES)


def spoils_capture(error: BaseException) -> bool:
    """Return True if capturing a graph failed. The step itself may still run."""
    if is_out_of_memory(error):
        return True
    return isinstance(error, RuntimeError) and _says(error, _CAPTURE_PHRASES)


def _says(error: BaseException, phrases: tuple[str, ...]) -> bool:
    text = str(error).lower()
    return any(phrase in text for phrase in phrases)


def describe_device(device: torch.device) -> str:
    """Return a sentence with the GPU and the libraries on which a fault depends."""
    libraries = f"torch {torch.__version__}, Triton {triton.__version__}"
    if device.type != "cuda":
        return f"On a CPU, {libraries}."
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return f"{torch.cuda.get_device_name(device)}, compute capability {capability}, {libraries}."
