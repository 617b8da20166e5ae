"""Parts of scripts/bench_cuda.py and scripts/check_cuda.py."""
