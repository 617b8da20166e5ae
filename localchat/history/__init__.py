"""Conversations on disk: one SQLite file with full-text search.

`store.History` is the file, `autosave.Autosave` writes a conversation into it while an answer streams.
"""
