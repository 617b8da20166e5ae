"""Conversations as values: messages, their tree of branches, and what is sent when it outgrows the context.

Doors hold them; nothing here knows a screen, a disk or an engine.
"""
