"""Settings, paths and remote servers of a user."""
