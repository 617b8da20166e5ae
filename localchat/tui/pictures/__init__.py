"""Pictures in the terminal, as rows that scroll and clip like text. No Textual."""
