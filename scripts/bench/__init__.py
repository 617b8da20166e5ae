"""Benchmarks, each a script; LOG.md has the dated results."""
