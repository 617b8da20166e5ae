"""The sampler contract in numpy, which every backend implements."""
