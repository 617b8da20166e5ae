"""Parts of scripts/bench/bench_cuda.py and scripts/tools/stress_cuda.py."""
