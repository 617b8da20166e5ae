"""Conversations on disk: one SQLite file with full-text search.

`store.History` is the file; `autosave.Autosave` writes a conversation to it while an answer streams.
"""
