"""Compiles Triton kernels for the shapes of a model in worker processes, before they are needed."""
