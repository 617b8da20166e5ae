"""Executes step plans on one GPU: input batch, CUDA graphs, sampler and device state."""
