"""Tensor parallelism: one process per GPU (a rank) computes a part of every layer."""
