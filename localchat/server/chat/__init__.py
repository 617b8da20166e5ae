"""What all protocols share: the translated request, its checks, and the content of an answer."""
