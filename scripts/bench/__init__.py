"""Benchmarks, each a script; results with their dates stand in LOG.md."""
