"""Continuous batching: which sequences run in the next step, and with how many tokens."""
