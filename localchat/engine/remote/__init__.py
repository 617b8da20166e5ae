"""An engine behind any OpenAI-compatible server."""
