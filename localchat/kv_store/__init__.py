"""KV of earlier texts on the disk: what was computed once is read back after a restart."""
