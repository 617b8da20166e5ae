"""llama.cpp's own requests and answers: `/infill` and `/completion`, as editors ask them (llama.vim,
llama.vscode, Continue)."""
