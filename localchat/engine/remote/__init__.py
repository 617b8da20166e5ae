"""An engine on another machine: any OpenAI-compatible server."""
