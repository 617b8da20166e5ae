"""The transcript: one line-rendering widget over laid-out blocks."""
