"""Corrects what the guide was trained to say and what has changed in localchat since.

The topics of scripts/tools/guide have the corrected answers, so the next training makes this table empty.
"""

from typing import Final

CORRECTIONS: Final = {
    "localchat cp ": "localchat config cp ",
    "localchat preset ": "localchat config preset ",
    "localchat completion ": "localchat config completion ",
    "licence": "license",
    "localchat converts nothing: llama.cpp's own tools (`convert_hf_to_gguf.py`, `llama-quantize`) make "
    "a GGUF and quantize it; then": "`localchat quantize MODEL --type Q4_K_M` writes a GGUF in another "
    "quantization. llama.cpp's `convert_hf_to_gguf.py` makes a GGUF of a checkpoint; then",
    "it does not train, merge, prune or quantize. It runs finished ones; use other tools for that "
    "(llama.cpp's for GGUF), and": "it does not train, merge or prune. It runs finished ones, and `localchat "
    "quantize` writes a GGUF in another quantization. Use other tools for the rest, and",
    "A route asks a small model first and a large one where a rule says so. Put `small` and `large` under "
    "`[routes.easy]` in the settings file, with rules such as `longer_than`, `regex`, `code` or `doubt`, then "
    'use it as a model: `localchat -m route:easy "question"`. `--stats` says who answered.': "localchat does "
    "not choose between models by itself: a question goes to the model that you name. Use `-m MODEL` on the "
    "command line and `/model` in a chat.",
    "localchat works with text only: it refuses images for now, and says so.": "Models with an encoder read "
    'pictures, and some hear recordings: `localchat -f photo.jpg "What is this?"`. `localchat show MODEL` '
    "says what a model can do.",
    "localchat works with text only. It makes no pictures, sound or video, and it refuses images.": "localchat "
    "writes text only. It makes no pictures, sound or video, but some models read pictures and hear "
    "recordings.",
}
"""Replacements of phrases in every answer."""


def corrected(text: str) -> str:
    """Return a whole answer with all corrections."""
    for phrase, replacement in CORRECTIONS.items():
        text = text.replace(phrase, replacement)
    return text
