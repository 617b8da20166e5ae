"""llama.cpp's own `/infill` and `/completion`, as llama.vim, llama.vscode and Continue use them."""
