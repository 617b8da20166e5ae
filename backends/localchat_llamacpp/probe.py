"""What decoding costs here, by decoding with stand-ins (stand_in.py): how fast this build reads weights of a
number format, and what a layer takes besides.

A token's time beyond its products is attention over the cache, which depends on the heads and on the cache's
format, and some thirty operations a layer after each of which the threads wait for each other. Both are
measured with the model's own heads, in caches as cold as the weights would leave them.

Run as a process of its own (`python -m localchat_llamacpp.probe`, the question as JSON on stdin): native code
may crash, and a door stays light. Prints a line of JSON for each finding as it comes.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from localchat_llamacpp.probing import Finding, Layer, Question
from localchat_llamacpp.stand_in import StandIn, write

CONTEXT_TOKENS: Final = 384
"""In the cache while a layer is timed: a short conversation."""
_PART_TOKENS: Final = 128
_ROOM_TOKENS: Final = 2048
"""Of the cache: values lie a whole cache apart where attention is not flash."""
_MATRIX_BYTES: Final = 64 << 20
"""Larger than most last-level caches, so that weights come from memory as they do in a model."""
_WIDTH: Final = 4096
_LAYERS: Final = 5
_LEAST_S, _MOST_S = 0.04, 0.4
_AGREE: Final = 4
"""Steps within a twentieth of the best that make it believable."""
_MOST_STEPS: Final = 1500
_Q8_0: Final = 8


class Timing(msgspec.Struct, frozen=True):
    """The best step, and whether others came near it."""

    best_s: float
    settled: bool


def answer(question: Question, folder: Path) -> Iterator[Finding]:
    """Every finding, one after another. folder: takes the stand-ins. Loads the library. What this build cannot
    do is left out."""
    stage = _Stage(folder / "stand-in.gguf", question.threads)
    plain = Layer(1, 1, 64, "f16", False)
    least = stage.timed(StandIn(1, 1, 1, 64, _WIDTH, 256, _Q8_0, _Q8_0), plain, cold=False)
    for code in question.codes:
        model = _matrix(code)
        found = stage.timed(model, plain, cold=False)
        best_s = max(found.best_s - least.best_s, found.best_s / 2)
        yield Finding(found.settled, code=code, bytes_per_s=model.feed_bytes / best_s)
    for layer in question.layers:
        few, many = (
            stage.timed(
                StandIn(n, layer.heads, layer.kv_heads, layer.head_width, 32, 32, _Q8_0, _Q8_0),
                layer,
                cold=True,
            )
            for n in (1, _LAYERS)
        )
        layer_s = max((many.best_s - few.best_s) / (_LAYERS - 1), many.best_s / _LAYERS / 4)
        yield Finding(
            few.settled and many.settled,
            layer=layer,
            layer_s=layer_s,
            step_s=max(few.best_s - layer_s, 0.0),
        )


def _matrix(code: int) -> StandIn:
    """A layer whose ways up, gate and down are of this format, and together of the wanted size."""
    one = StandIn(1, 1, 1, 64, _WIDTH, 256, code, _Q8_0)
    return one._replace(feed=256 * max(_MATRIX_BYTES // one.feed_bytes, 1))


class _Stage:
    """Decodes with stand-ins, one after another in the same file."""

    def __init__(self, path: Path, threads: int) -> None:
        self._path, self._threads = path, threads
        self._others = np.ones(_MATRIX_BYTES // 8, np.int64)

    def timed(self, model: StandIn, layer: Layer, *, cold: bool) -> Timing:
        """The best step of one row. cold: something else is read between two steps."""
        write(self._path, model)
        with self._decoding(layer, CONTEXT_TOKENS if cold else 1) as step:
            return _best(step, self._forget if cold else _nothing)

    def _forget(self) -> None:
        self._others.sum()

    @contextmanager
    def _decoding(self, layer: Layer, known: int) -> Iterator[Callable[[], None]]:
        """A function that decodes one token more behind `known` ones, always at the same place."""
        from localchat_llamacpp.batch import Batch
        from localchat_llamacpp.library import library
        from localchat_llamacpp.weights import ContextWish, load_weights, open_context

        api = library().api
        weights = load_weights(
            self._path,
            gpu_layers=0,
            safe_mode=False,
            total_bytes=1,
            progress=lambda done, total: True,
        )
        wish = ContextWish(
            context_tokens=_ROOM_TOKENS - 16,
            slots=1,
            step_tokens=_PART_TOKENS,
            kv_type=layer.kv_type,
            flash_attention=layer.flash,
            threads=self._threads,
            window_only=False,
        )
        context, _ = open_context(weights, wish)
        memory, batch = api.llama_get_memory(context), Batch(_PART_TOKENS, 2)

        def decode(start: int, count: int) -> None:
            batch.clear()
            batch.add(0, start, [1] * count, [count - 1])
            if api.llama_decode(context, batch.native):
                raise RuntimeError("a stand-in cannot be decoded")
            api.llama_synchronize(context)

        def step() -> None:
            decode(known, 1)

        try:
            for start in range(0, known, _PART_TOKENS):
                decode(start, min(_PART_TOKENS, known - start))
            step()
            yield lambda: (api.llama_memory_seq_rm(memory, 0, known, -1), step())[1]
        finally:
            api.llama_free(context)
            weights.close()


def _nothing() -> None:
    return


def _best(step: Callable[[], None], between: Callable[[], None]) -> Timing:
    """The shortest of several steps: others on this machine only ever make one longer. On a busy machine it
    goes on until some agree, or for so long."""
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < _MOST_STEPS:
        elapsed = time.perf_counter() - begin
        agree = sum(one <= 1.05 * min(times) for one in times) if times else 0
        if agree >= _AGREE and elapsed >= _LEAST_S:
            return Timing(min(times), settled=True)
        if elapsed >= _MOST_S and len(times) >= _AGREE:
            break
        between()
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return Timing(min(times), settled=False)


def main() -> None:
    """Answer the question on stdin."""
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    with tempfile.TemporaryDirectory(prefix="localchat-probe-") as folder:
        for finding in answer(question, Path(folder)):
            sys.stdout.buffer.write(msgspec.json.encode(finding) + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
