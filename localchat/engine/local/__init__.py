"""An engine in a child process."""
