"""llama.cpp's own server, from the wheel that every install ships, in a process of its own.

`python -m tests.support.rival_server MODEL PROJECTOR` reads a JSON list of chat requests, and prints a JSON
list of the responses as its last line.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

_FLASH_OFF = 0


def rival_answers(
    model: Path, projector: Path, requests: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the responses of llama.cpp's server to chat requests."""
    command = [sys.executable, "-m", "tests.support.rival_server", str(model), str(projector)]
    done = subprocess.run(
        command, input=json.dumps(requests), capture_output=True, text=True, timeout=300, check=True
    )
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def _serve(model: str, projector: str) -> list[dict[str, Any]]:
    # mypy finds no types in the package.
    xllamacpp: Any = import_module("xllamacpp")
    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.mmproj.path = projector
    parameters.n_ctx = 2048
    parameters.n_parallel = 1
    parameters.cpuparams.n_threads = 1
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type(_FLASH_OFF)
    server = xllamacpp.Server(parameters)
    answers = []
    for request in json.load(sys.stdin):
        answer = server.handle_chat_completions(request)
        answers.append(json.loads(answer) if isinstance(answer, str | bytes) else answer)
    return answers


if __name__ == "__main__":
    texts = _serve(*sys.argv[1:])
    sys.stdout.write(f"\n{json.dumps(texts)}\n")
    sys.stdout.flush()
