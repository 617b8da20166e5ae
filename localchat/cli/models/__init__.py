"""Verbs that fetch, list, inspect and remove models."""
