"""Anthropic's Messages API over the same exchange as chats: what its clients send (wire.py), what that is as
a chat (asking.py), and how the answer is written (reply.py)."""
