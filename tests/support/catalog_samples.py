"""Shared by tests: SEVEN_B."""

SEVEN_B = {"temperature": 0.7, "top_p": 0.8, "top_k": 20.0, "repetition_penalty": 1.05}
