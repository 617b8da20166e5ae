"""Converts checkpoints and adapters of transformers to GGUF."""
