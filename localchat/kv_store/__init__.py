"""KV of earlier texts on disk. After a restart it is loaded instead of computed again."""
