"""Parts of the benchmark scripts. They import each other as `scripts.bench.llamacpp`, from the checkout's
root."""
