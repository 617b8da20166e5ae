"""Grammars and JSON schemas: compilation, token masks, and tool calls."""
