"""Readers of GGUF and safetensors headers, with bounds on everything that native code trusts."""
