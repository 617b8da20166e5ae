"""Parts of bench_kernels.py and tune_kernels.py."""
