"""Everything that touches private parts of Textual."""
