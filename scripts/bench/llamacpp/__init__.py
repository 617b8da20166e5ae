"""Parts of the benchmark scripts, imported as `scripts.bench.llamacpp` from the checkout's root."""
