"""Reads the configuration of a checkpoint or a GGUF file. Imports no torch."""
