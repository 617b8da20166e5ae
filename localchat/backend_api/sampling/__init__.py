"""Sampling contract in numpy, which every backend implements."""
