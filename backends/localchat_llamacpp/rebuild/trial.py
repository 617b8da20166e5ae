"""Tries one llama.cpp library: greedy tokens of the guide.

Runs as a module (helper_process.py), because the library may crash. LOCALCHAT_LLAMACPP_LIBRARY names it. The
request is JSON on stdin, and the result JSON on stdout.
"""

import sys
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

import localchat
from localchat.errors import LocalchatError
from localchat_llamacpp.batch import Batch
from localchat_llamacpp.native import library
from localchat_llamacpp.native_model import (
    ContextSpec,
    Placement,
    load_vocabulary,
    load_weights,
    open_context,
)
from localchat_llamacpp.tokenizer import LlamaTokenizer

_PROMPTS: Final = (
    "What is a KV cache, and why does a model need one?",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10: continue the list, then write a short poem in Python.",
)
_GREEDY_TOKENS: Final = 32
_PROMPT_TOKENS: Final = 128
_CONTEXT_TOKENS: Final = 512
_ALL_LAYERS: Final = 999


class TrialRequest(msgspec.Struct, frozen=True):
    """Options of a trial."""

    threads: int
    gpu: bool = False
    """Whether to put all layers on the GPU."""
    safe_mode: bool = False
    """Whether to load as models are loaded after a crash."""


class TrialResult(msgspec.Struct, frozen=True):
    """Text of one library."""

    tokens: tuple[int, ...]
    """Greedy continuations of the guide."""
    margins: tuple[float, ...]
    """Lead of each token's logit over the second one."""


def trial(request: TrialRequest) -> TrialResult:
    """Load the library and try it. Raises LocalchatError."""
    if request.gpu and not library().api.llama_supports_gpu_offload():
        raise LocalchatError("it finds no GPU that it can use")
    guide = Path(localchat.__file__).with_name("guide") / "guide.gguf"
    vocabulary, _ = load_vocabulary(guide)
    with closing(LlamaTokenizer(vocabulary)) as tokenizer:
        prompts = [tokenizer.encode(text, add_bos=True) for text in _PROMPTS]
        size = tokenizer.vocab_size
    with closing(_Context(guide, request)) as context:
        pairs = [pair for prompt in prompts for pair in context.greedy(prompt, size)]
    return TrialResult(tuple(token for token, _ in pairs), tuple(margin for _, margin in pairs))


class _Context:
    """A loaded model with an empty context."""

    def __init__(self, path: Path, request: TrialRequest) -> None:
        self._api: Any = library().api
        self._weights = load_weights(
            path,
            placement=Placement(_ALL_LAYERS if request.gpu else 0),
            safe_mode=request.safe_mode,
            total_bytes=1,
            progress=lambda done, total: True,
        )
        spec = ContextSpec(
            context_tokens=_CONTEXT_TOKENS,
            slots=1,
            step_tokens=_PROMPT_TOKENS,
            kv_type="f16",
            flash_attention=True,
            threads=request.threads,
            window_only=False,
        )
        self._handle, _ = open_context(self._weights, spec)
        self._memory = self._api.llama_get_memory(self._handle)
        self._batch = Batch(_PROMPT_TOKENS, 2)

    def close(self) -> None:
        self._api.llama_free(self._handle)
        self._weights.close()

    def greedy(self, prompt: list[int], vocab_size: int) -> list[tuple[int, float]]:
        """Return the likeliest continuation, and the lead of each token."""
        pairs: list[tuple[int, float]] = []
        self._api.llama_memory_seq_rm(self._memory, 0, -1, -1)
        self._decode(0, prompt)
        for position in range(len(prompt), len(prompt) + _GREEDY_TOKENS):
            pointer = self._api.llama_get_logits(self._handle)
            logits = np.ctypeslib.as_array(pointer, (vocab_size,))
            second, first = np.argpartition(logits, -2)[-2:]
            token = int(first if logits[first] >= logits[second] else second)
            pairs.append((token, float(abs(logits[first] - logits[second]))))
            self._decode(position, [token])
        return pairs

    def _decode(self, start: int, tokens: list[int]) -> None:
        self._batch.clear()
        self._batch.add(0, start, tokens, [len(tokens) - 1])
        status = self._api.llama_decode(self._handle, self._batch.native)
        self._api.llama_synchronize(self._handle)
        if status:
            raise RuntimeError(f"llama.cpp failed with status {status}")


def main() -> None:
    """Answer the request on stdin."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=TrialRequest)
    try:
        result = trial(request)
    except LocalchatError as problem:
        sys.exit(problem.message)
    sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
