"""A chat session without a screen, shared by the terminal UI and the line mode."""
