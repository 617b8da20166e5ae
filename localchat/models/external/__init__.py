"""Models that other programs on this machine downloaded: found where they lie, never copied."""
