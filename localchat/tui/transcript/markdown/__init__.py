"""Markdown as rows of styled text: parsed by markdown-it, laid out here, without colours and without textual.

`layout(text, width)` for a whole text, `IncrementalMarkdown` for one that is being written.
"""

from localchat.tui.transcript.markdown.incremental import IncrementalMarkdown
from localchat.tui.transcript.markdown.layout import layout
from localchat.tui.transcript.markdown.rows import EMPTY, Look, Piece, Row

__all__ = ["EMPTY", "IncrementalMarkdown", "Look", "Piece", "Row", "layout"]
