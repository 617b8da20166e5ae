"""Benchmarks, each a script. LOG.md has the newest figure of each."""
