"""Verbs and modules that ask a model and show its answer."""
