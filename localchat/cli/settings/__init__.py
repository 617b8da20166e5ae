"""Verbs that change settings and inspect the machine."""
