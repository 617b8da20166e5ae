"""Parts of bench_tui.py: the text, the programs that are measured, the pseudo-terminal that measures."""
