"""Everything that uses private parts of Textual.

Textual is pinned exactly; tests/tui/test_textual_internals.py names each private part, so that an upgrade
fails there.
"""
