"""The CUDA backend: safetensors checkpoints through PyTorch and Triton on NVIDIA GPUs."""

from localchat_cuda.backend import CudaBackend

__all__ = ["CudaBackend"]
