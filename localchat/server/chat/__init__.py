"""Base of all protocols: the translated request, its checks, and the content of an answer."""
