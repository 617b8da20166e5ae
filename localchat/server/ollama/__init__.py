"""The part of Ollama's API that clients ask for."""
