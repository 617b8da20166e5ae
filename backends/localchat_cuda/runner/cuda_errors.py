"""Tells apart the errors that torch, CUDA and Triton raise."""

import torch

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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory of the GPU, or pinned memory, ran out.

    Only torch's allocator has a class for it. Graphs, modules, library handles and pinned memory come back as
    RuntimeError with a message.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _says(error, _MEMORY_PHRASES)


def spoils_capture(error: BaseException) -> bool:
    """Whether an error means that a graph could not be captured, while the step itself may still run."""
    if is_out_of_memory(error):
        return True
    return isinstance(error, RuntimeError) and _says(error, _CAPTURE_PHRASES)


def _says(error: BaseException, phrases: tuple[str, ...]) -> bool:
    text = str(error).lower()
    return any(phrase in text for phrase in phrases)
