"""Conversations on disk: one SQLite file with full-text search."""
