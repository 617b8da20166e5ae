"""Verbs that measure speed and quality, and plan capacity."""
