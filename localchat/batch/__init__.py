"""Batches: a file of prompts, answered by a server with its batch full, into a file that can be continued."""
