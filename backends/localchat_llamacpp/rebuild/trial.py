"""Tries one llama.cpp library: greedy tokens of the guide, speed of prefill and decode.

Runs as a module (helper_process.py), because the library may crash. LOCALCHAT_LLAMACPP_LIBRARY names it. The
request is JSON on stdin, and the result JSON on stdout.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
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
from localchat_llamacpp.rebuild.synthetic_gguf import TOKENS, SyntheticModel, write
from localchat_llamacpp.tokenizer import LlamaTokenizer

_PROMPTS: Final = (
    "What is a KV cache, and why does a model need one?",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10: continue the list, then write a short poem in Python.",
)
_GREEDY_TOKENS: Final = 32
_MODEL: Final = SyntheticModel(6, 16, 4, 64, 1024, 4096, "Q4_K")
"""60 MB, mostly of Q4_K, the format of most models."""
_PROMPT_TOKENS: Final = 128
_CONTEXT_TOKENS: Final = 512
_DECODE_STEPS: Final = 64
_REPETITIONS: Final = 3
_ALL_LAYERS: Final = 999


class TrialRequest(msgspec.Struct, frozen=True):
    """Options of a trial."""

    threads: int
    gpu: bool = False
    """Whether to put all layers on the GPU."""
    safe_mode: bool = False
    """Whether to load as models are loaded after a crash."""


class TrialResult(msgspec.Struct, frozen=True):
    """Tokens and speeds of one library."""

    tokens: tuple[int, ...]
    """Greedy continuations of the guide."""
    margins: tuple[float, ...]
    """Lead of each token's logit over the second one."""
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


def trial(request: TrialRequest, folder: Path) -> TrialResult:
    """Load the library and try it. folder: receives a synthetic model."""
    guide = Path(localchat.__file__).with_name("guide") / "guide.gguf"
    vocabulary, _ = load_vocabulary(guide)
    with closing(LlamaTokenizer(vocabulary)) as tokenizer:
        prompts = [tokenizer.encode(text, add_bos=True) for text in _PROMPTS]
        size = tokenizer.vocab_size
    with closing(_Context(guide, request)) as context:
        pairs = [pair for prompt in prompts for pair in context.greedy(prompt, size)]
    path = folder / "synthetic.gguf"
    write(path, _MODEL)
    with closing(_Context(path, request)) as context:
        prefill_s, decode_s = context.times()
    return TrialResult(
        tuple(token for token, _ in pairs),
        tuple(margin for _, margin in pairs),
        _PROMPT_TOKENS / prefill_s,
        1 / decode_s,
    )


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
        self._clear()
        self._decode(0, prompt)
        for position in range(len(prompt), len(prompt) + _GREEDY_TOKENS):
            pointer = self._api.llama_get_logits(self._handle)
            logits = np.ctypeslib.as_array(pointer, (vocab_size,))
            second, first = np.argpartition(logits, -2)[-2:]
            token = int(first if logits[first] >= logits[second] else second)
            pairs.append((token, float(abs(logits[first] - logits[second]))))
            self._decode(position, [token])
        return pairs

    def times(self) -> tuple[float, float]:
        """Return the shortest seconds of a prompt and of a token: other programs only lengthen them."""
        prompt = [n * 7 % TOKENS for n in range(_PROMPT_TOKENS)]
        prefill: list[float] = []
        decode: list[float] = []
        for _ in range(_REPETITIONS):
            self._clear()
            prefill.append(_timed(partial(self._decode, 0, prompt)))
            for step in range(_DECODE_STEPS):
                position = _PROMPT_TOKENS + step
                decode.append(_timed(partial(self._decode, position, [position % TOKENS])))
        return min(prefill), min(decode)

    def _clear(self) -> None:
        self._api.llama_memory_seq_rm(self._memory, 0, -1, -1)

    def _decode(self, start: int, tokens: list[int]) -> None:
        self._batch.clear()
        self._batch.add(0, start, tokens, [len(tokens) - 1])
        status = self._api.llama_decode(self._handle, self._batch.native)
        self._api.llama_synchronize(self._handle)
        if status:
            raise RuntimeError(f"llama.cpp failed with status {status}")


def _timed(call: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def main() -> None:
    """Answer the request on stdin."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=TrialRequest)
    with tempfile.TemporaryDirectory(prefix="localchat-trial-") as folder:
        try:
            result = trial(request, Path(folder))
        except LocalchatError as problem:
            sys.exit(problem.message)
    sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
