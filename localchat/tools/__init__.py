"""Tools that a model may call in a chat: its own few, those of MCP servers, consent, undo and the loop.

`toolset.py` opens the tools of a session, and `loop.py` runs the calls of an answer. A front end implements
`consent.Consent` and shows what `loop.Report` reports. Nothing here is imported while tools are off.
"""
