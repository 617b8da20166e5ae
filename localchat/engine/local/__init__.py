"""An engine in a child process on this machine."""
