"""Verbs that measure speed and quality, tune settings and plan capacity."""
