"""Measures decoding with synthetic models (synthetic_gguf.py): bytes a second by format, seconds of a layer.

A token's time apart from its gemms is attention over the cache, which depends on the heads and on the cache's
format, and some thirty operations a layer after each of which the threads wait for each other. Both are
measured with the model's own heads. Weights stand between the layers, because they drive the cache out of the
processor: attention over what is still there takes a third of the time (measured).

Run as a module (helper_process.py), the request as JSON on stdin; prints a line of JSON for each result as it
comes.
"""

import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Final

import msgspec

from localchat_llamacpp.speed.benchmark import (
    FOLDER_PREFIX,
    BenchmarkRequest,
    BenchmarkResult,
    Layer,
)
from localchat_llamacpp.speed.synthetic_gguf import TOKENS, SyntheticModel, write

CONTEXT_TOKENS: Final = 384
"""In the cache while a layer is timed: a short conversation."""
_PART_TOKENS: Final = 128
_PLACES: Final = 32
_ROOM_TOKENS: Final = 2048
"""Of the cache: values lie a whole cache apart where attention is not flash."""
_MATRIX_BYTES: Final = 64 << 20
"""Larger than most last-level caches, so that weights come from memory as they do in a model."""
_WIDTH: Final = 4096
_LAYERS: Final = 6
_LAYER_WIDTH: Final = 1024
_LEAST_S = 0.05
_MOST_S = 0.6
_AGREE: Final = 4
"""Steps within a twentieth of the best that make it believable."""
_MOST_STEPS: Final = 1500
_MOST_AROUND: Final = 0.08
"""Share of a step that a step with hardly a model in it can take: it is short, and soon disturbed."""
_QUIET_S: Final = 1e-3
_Q8_0: Final = 8
_LEAST_LAYER_S: Final = 5e-6
_LOOK_S: Final = 0.5
"""Between two looks whether the process that asked still lives."""


class Timing(msgspec.Struct, frozen=True):
    """The best step, and whether others came near it."""

    best_s: float
    stable: bool


def run_benchmark(request: BenchmarkRequest, folder: Path) -> Iterator[BenchmarkResult]:
    """Every result, one after another. folder: for the synthetic models. Loads the library."""
    timer = _DecodeTimer(folder / "synthetic.gguf", request.threads, safe_mode=request.safe_mode)
    plain = Layer(1, 1, 64, "f16", False, _Q8_0)
    smallest = timer.timed(SyntheticModel(1, 1, 1, 64, 256, 256, _Q8_0), plain, 1)
    # Where even this takes long, the threads wait for cores: no result counts as stable.
    quiet = smallest.stable and smallest.best_s < _QUIET_S
    yield BenchmarkResult(quiet, step_s=smallest.best_s)
    rates: dict[int, float] = {}
    layer_codes = (layer.code for layer in request.layers)
    for code in dict.fromkeys((_Q8_0, *request.codes, *layer_codes)):
        model = _filled(SyntheticModel(1, 1, 1, 64, _WIDTH, 256, code))
        found = timer.timed(model, plain, 1)
        around_s = min(smallest.best_s, _MOST_AROUND * found.best_s)
        rates[code] = model.weights_bytes / (found.best_s - around_s)
        yield BenchmarkResult(quiet and found.stable, code=code, bytes_per_s=rates[code])
    for layer in request.layers:
        heads = layer.heads, layer.kv_heads, layer.head_width
        model = _filled(SyntheticModel(_LAYERS, *heads, _LAYER_WIDTH, 256, layer.code))
        found = timer.timed(model, layer, CONTEXT_TOKENS)
        rest_s = found.best_s - model.feed_forward_bytes / rates[layer.code]
        rest_s -= (model.weights_bytes - model.feed_forward_bytes) / rates[_Q8_0]
        rest_s -= min(smallest.best_s, _MOST_AROUND * found.best_s)
        yield BenchmarkResult(
            quiet and found.stable, layer=layer, layer_s=max(rest_s / _LAYERS, _LEAST_LAYER_S)
        )


def _filled(model: SyntheticModel) -> SyntheticModel:
    """The model with a feed-forward block that makes it as large as needed."""
    more = model._replace(feed_forward=2 * model.feed_forward).weights_bytes - model.weights_bytes
    count = max(_MATRIX_BYTES - model.weights_bytes, 0) // more
    return model._replace(feed_forward=model.feed_forward * (1 + count))


class _DecodeTimer:
    """Decodes with synthetic models, one after another in the same file."""

    def __init__(self, path: Path, threads: int, *, safe_mode: bool) -> None:
        self._path = path
        self._threads = threads
        self._safe_mode = safe_mode

    def timed(self, model: SyntheticModel, layer: Layer, known: int) -> Timing:
        """The best step of one row, with so many tokens in the cache."""
        write(self._path, model)
        with self._decoding(layer, known) as step:
            return _best(step)

    @contextmanager
    def _decoding(self, layer: Layer, known: int) -> Iterator[Callable[[], None]]:
        """A function that decodes one token more after `known` ones and those of the last calls.

        Never the same twice in a row, for processors learn what repeats itself.
        """
        from localchat_llamacpp.batch import Batch
        from localchat_llamacpp.native import library
        from localchat_llamacpp.native_model import (
            ContextSpec,
            Placement,
            load_weights,
            open_context,
        )

        api = library().api
        weights = load_weights(
            self._path,
            placement=Placement(),
            safe_mode=self._safe_mode,
            total_bytes=1,
            progress=lambda done, total: True,
        )
        spec = ContextSpec(
            context_tokens=_ROOM_TOKENS - 16,
            slots=1,
            step_tokens=_PART_TOKENS,
            kv_type=layer.kv_type,
            flash_attention=layer.flash,
            threads=self._threads,
            window_only=False,
        )
        context, _ = open_context(weights, spec)
        memory = api.llama_get_memory(context)
        batch = Batch(_PART_TOKENS, 2)

        def decode(start: int, width: int) -> None:
            batch.clear()
            words = [(start * 5 + n) % TOKENS for n in range(width)]
            batch.add(0, start, words, [width - 1])
            if api.llama_decode(context, batch.native):
                raise RuntimeError("a synthetic model cannot be decoded")
            api.llama_synchronize(context)

        taken = count()

        def step() -> None:
            place = next(taken) % _PLACES
            if not place:
                api.llama_memory_seq_rm(memory, 0, known, -1)
            decode(known + place, 1)

        try:
            for start in range(0, known, _PART_TOKENS):
                decode(start, min(_PART_TOKENS, known - start))
            step()
            yield step
        finally:
            api.llama_free(context)
            weights.close()


def _best(step: Callable[[], None]) -> Timing:
    """The shortest of several steps: others on this machine only ever make one longer. On a busy machine it
    goes on until some agree, or for so long."""
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < _MOST_STEPS:
        elapsed = time.perf_counter() - begin
        agree = sum(one <= 1.05 * min(times) for one in times) if times else 0
        if agree >= _AGREE and elapsed >= _LEAST_S:
            return Timing(min(times), stable=True)
        if elapsed >= _MOST_S and len(times) >= _AGREE:
            break
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return Timing(min(times), stable=False)


def _end_with(parent: int) -> None:
    """End when the process that asked has ended: nobody reads the results, and models stay in its folder."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    folder = Path(tempfile.gettempdir())
    if folder.name.startswith(FOLDER_PREFIX):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def main() -> None:
    """Answer the request on stdin."""
    parent = os.getppid()
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=BenchmarkRequest)
    threading.Thread(target=_end_with, args=(parent,), name="parent", daemon=True).start()
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as folder:
        for finding in run_benchmark(request, Path(folder)):
            sys.stdout.buffer.write(msgspec.json.encode(finding) + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
