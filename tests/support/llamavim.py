"""Requests of llama.vim, and the fields that it reads from an answer."""

import re
from typing import Any

VIM_CHECK = re.compile(rb'"content"\s*:"')
"""What llama.vim looks for before it reads a response."""
VIM_FIELDS = [
    "content",
    "timings/prompt_n",
    "timings/prompt_ms",
    "timings/prompt_per_token_ms",
    "timings/prompt_per_second",
    "timings/predicted_n",
    "timings/predicted_ms",
    "timings/predicted_per_token_ms",
    "timings/predicted_per_second",
    "truncated",
    "tokens_cached",
]
VIM: dict[str, Any] = {
    "id_slot": 0,
    "input_prefix": "import os\n\n",
    "input_suffix": "\n\nprint(main())\n",
    "input_extra": [{"text": "X = 1\n", "time": [1, 2], "filename": "x.py"}, {"text": "Y = 2\n"}],
    "prompt": "def main(",
    "n_predict": 128,
    "stop": [],
    "n_indent": 0,
    "top_k": 40,
    "top_p": 0.90,
    "samplers": ["top_k", "top_p", "infill"],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "response_fields": VIM_FIELDS,
}
VIM_WARM: dict[str, Any] = {
    "id_slot": 0,
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": VIM["input_extra"],
    "prompt": "",
    "n_predict": 0,
    "temperature": 0.0,
    "samplers": [],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 1,
    "t_max_predict_ms": 1,
    "response_fields": [""],
}
