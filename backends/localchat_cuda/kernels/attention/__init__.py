"""Paged attention: the reference, decode, prefill, and the FP8 KV cache."""
