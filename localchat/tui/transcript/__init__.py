"""The transcript: one widget that renders rows of laid-out blocks."""
