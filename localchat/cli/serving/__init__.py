"""Verbs that serve models to other programs, and batches of prompts."""
