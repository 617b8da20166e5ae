"""Parts of scripts/bench/bench_cuda.py and scripts/check_cuda.py."""
