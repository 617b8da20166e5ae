"""The engine process: input, scheduling, KV cache, grammars and output of one model."""
