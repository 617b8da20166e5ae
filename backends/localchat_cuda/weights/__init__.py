"""Reads checkpoints and brings their tensors into the layout of the kernels."""
