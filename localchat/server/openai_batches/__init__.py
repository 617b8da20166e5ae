"""OpenAI's files and batches: requests in a file, answered when no one waits for the engine."""
