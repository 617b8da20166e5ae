"""OpenAI's Responses API over the same exchange as chats, without a memory of its own: what its clients send
(wire.py), what that is as a chat (asking.py), and how the answer is written (record.py, reply.py)."""
