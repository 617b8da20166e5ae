"""KV of earlier texts on disk, which is loaded after a restart instead of computed again."""
