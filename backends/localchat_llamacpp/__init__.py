"""The llama.cpp backend: GGUF models through llama.cpp's C API."""

from localchat_llamacpp.backend import LlamaCppBackend

__all__ = ["LlamaCppBackend"]
