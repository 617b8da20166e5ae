"""Parts of bench_tui.py: the text, the measured programs, and the pseudo-terminal."""
