"""OpenAI's chat, completions, embeddings and models endpoints."""
