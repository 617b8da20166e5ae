"""Bounded readers for GGUF and safetensors headers."""
