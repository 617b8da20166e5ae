"""Markdown as rows of styled text: parsed by markdown-it, laid out here. No colours, no Textual.

`layout(text, width)` lays out a complete text, `IncrementalMarkdown` one that streams.
"""

from localchat.tui.transcript.markdown.incremental import IncrementalMarkdown
from localchat.tui.transcript.markdown.layout import layout
from localchat.tui.transcript.markdown.rows import EMPTY, Look, Piece, Row

__all__ = ["EMPTY", "IncrementalMarkdown", "Look", "Piece", "Row", "layout"]
