"""Model headers made from published shapes, for verdicts before a download."""
