"""Anthropic's Messages API: request types, their translation to a chat, and the answers."""
