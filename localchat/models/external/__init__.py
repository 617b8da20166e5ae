"""Finds models that other programs on this machine downloaded; nothing is copied."""
