"""Errors of torch, CUDA and Triton, in the words in which they come."""

import pytest
import torch
from triton.runtime.errors import OutOfResources

from localchat_cuda.runner.cuda_errors import is_device_fault, is_out_of_memory, spoils_capture

MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    MemoryError(),
]
CAPTURE = [
    torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture"),
    torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing"),
]
FAULTS = [
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("Triton Error [CUDA]: misaligned address"),
    RuntimeError("PassManager::run failed"),
    OutOfResources(300_000, 232_448, "shared memory"),
]
OTHERS = [
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("out of resource: shared memory, Required: 300000, Hardware limit: 232448"),
    ValueError("out of memory"),
    AssertionError("a paged cache cannot Drop"),
]


@pytest.mark.parametrize("error", MEMORY, ids=str)
def test_a_lack_of_memory_is_told_in_every_guise(error: BaseException) -> None:
    assert is_out_of_memory(error) and spoils_capture(error)


@pytest.mark.parametrize("error", CAPTURE, ids=str)
def test_a_spoilt_capture_is_no_lack_of_memory(error: BaseException) -> None:
    assert spoils_capture(error) and not is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_other_failures_are_neither(error: BaseException) -> None:
    assert not is_out_of_memory(error) and not spoils_capture(error)


@pytest.mark.parametrize("error", FAULTS, ids=str)
def test_a_failure_of_gpu_driver_or_compiler_is_a_fault(error: BaseException) -> None:
    assert is_device_fault(error) and not is_out_of_memory(error)


@pytest.mark.parametrize(
    "error", [ValueError("CUDA error"), RuntimeError("shapes differ")], ids=str
)
def test_a_bug_in_python_is_none(error: BaseException) -> None:
    assert not is_device_fault(error)
