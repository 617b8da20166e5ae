"""Compiles the Triton kernels of a model in worker processes, before they are needed."""
