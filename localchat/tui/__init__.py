"""The terminal UI. Importing this package imports no textual: the first frame is on a budget."""
