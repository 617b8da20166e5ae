"""The llama.cpp backend: GGUF models through llama-cpp-python's low-level API."""

from localchat_llamacpp.backend import LlamaCppBackend

__all__ = ["LlamaCppBackend"]
