"""The part of Ollama's API by which programs find models."""
