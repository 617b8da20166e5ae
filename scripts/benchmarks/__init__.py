"""Parts of the benchmark scripts. They import each other as `scripts.benchmarks`, from the checkout's root."""
