"""Runs the benchmark for results that are not cached yet, in a helper process, and caches them."""

import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import msgspec

from localchat.fit.speed_history import MeasurementCache
from localchat_llamacpp.build_advice import build_key
from localchat_llamacpp.helper_process import run_module

FOLDER_PREFIX: Final = "localchat-probe-"
SPIN: Final = "2000"
"""GOMPSPINCOUNT: threads that spin longer starve each other on a busy machine."""
_Q8_0: Final = 8
"""ggml's number of the format that every benchmark measures."""
_MOST_PROBES: Final = 3
"""Most repetitions."""
_LEAST_PROBE_S: Final = 1.0
"""With less time left, no further repetition starts."""
_ALIKE: Final = 0.9
"""Rates of two repetitions agree from this share of the higher one."""


class Layer(msgspec.Struct, frozen=True):
    """Properties that decide the time of a layer apart from its gemms."""

    heads: int
    kv_heads: int
    head_width: int
    kv_type: str
    flash: bool
    code: int
    """ggml's number of the format of its weights: attention is slower after some than after others (measured,
    flash attention over q8_0: 600 µs after Q4_K, 250 to 430 after Q8_0)."""


class BenchmarkRequest(msgspec.Struct, frozen=True):
    """Measurements to take."""

    threads: int
    codes: tuple[int, ...]
    """ggml's type numbers."""
    layers: tuple[Layer, ...]
    """Each is measured."""
    safe_mode: bool = False
    """As models are loaded where this build crashes otherwise."""


class BenchmarkResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """One number: `step_s` of a step with hardly a model in it, `bytes_per_s` of a code, or `layer_s` of a
    layer."""

    stable: bool
    """Enough steps agreed; otherwise other programs disturbed it."""
    code: int = -1
    bytes_per_s: float = 0.0
    layer: Layer | None = None
    layer_s: float = 0.0
    step_s: float = 0.0


class Costs(NamedTuple):
    """Times of this build and machine with a number of threads."""

    bytes_per_s: dict[int, float]
    """By ggml's type number."""
    layer_s: dict[Layer, float]
    """Seconds of a layer apart from its gemms."""
    step_s: float
    """Seconds of a step apart from its layers."""
    quiet: bool = True
    """Nothing else was busy meanwhile."""


_STEP: Final = "a step"
_DISTURBED_FRESH_S: Final = 60.0


class _Disturbed(NamedTuple):
    """Results of a benchmark that other programs disturbed: nobody keeps them, and soon they count again."""

    at: str
    until_s: float
    """Clock: time.monotonic()."""
    results: Mapping[str, float]


_disturbed: _Disturbed | None = None
"""The last one of this process. A list of models asks for dozens of estimates, and on a busy machine each
benchmark takes ten seconds, to find it busy still."""


def costs(
    threads: int, codes: Iterable[int], layers: Iterable[Layer], measures: MeasurementCache
) -> Costs:
    """Return cached results, and benchmark the missing ones for at most `measures.benchmark_s` seconds.

    A result is missing if the benchmark crashes or its time is over.
    """
    at = f"{build_key()} {threads} threads: "
    found = {
        name.removeprefix(at): value
        for name, value in measures.known().items()
        if name.startswith(at)
    }
    codes = sorted(set(codes))
    layers = list(dict.fromkeys(layers))
    global _disturbed
    request = BenchmarkRequest(
        threads,
        tuple(code for code in codes if _of_code(code) not in found),
        tuple(layer for layer in layers if _of_layer(layer) not in found),
    )
    quiet = True
    incomplete = bool(request.codes or request.layers or _STEP not in found)
    if incomplete and measures.benchmark_s > 0:
        lately = _disturbed
        if lately is not None and lately.at == at and time.monotonic() < lately.until_s:
            found = {**lately.results, **found}
            missing = tuple(code for code in request.codes if _of_code(code) not in found)
            if not missing:  # an estimate can do without the layers
                return _costs(found, codes, layers, quiet=False)
            request = BenchmarkRequest(threads, missing, ())
            quiet = False
        fresh: dict[str, float] = {}
        known_rate = found.get(_of_code(_Q8_0))
        for one in _best_results(request, known_rate, measures.benchmark_s):
            name, value = _key_and_value(one)
            found[name] = value
            if one.stable:
                fresh[at + name] = value
            quiet = quiet and one.stable
        measures.keep(fresh)
        if not (quiet and found):
            _disturbed = _Disturbed(at, time.monotonic() + _DISTURBED_FRESH_S, found)
    return _costs(found, codes, layers, quiet=quiet)


def _costs(
    found: Mapping[str, float], codes: Iterable[int], layers: Iterable[Layer], *, quiet: bool
) -> Costs:
    return Costs(
        {code: found[name] for code in codes if (name := _of_code(code)) in found},
        {layer: found[name] for layer in layers if (name := _of_layer(layer)) in found},
        found.get(_STEP, 0.0),
        quiet,
    )


def _best_results(
    request: BenchmarkRequest, known: float | None, limit_s: float
) -> list[BenchmarkResult]:
    """Of several repetitions the one with the most bytes a second.

    The system's placement of threads holds as long as the process: one in four got two thirds of the
    bandwidth of the others (two virtual cores). Two that agree are enough, or one that agrees with the
    `known` rate; more do not help where other programs are busy.
    """
    best: list[BenchmarkResult] = []
    rates = [known] if known else []
    most = 0.0
    end_s = time.monotonic() + limit_s
    for _ in range(_MOST_PROBES):
        left_s = end_s - time.monotonic()
        if best and left_s < _LEAST_PROBE_S:
            break
        found = list(_benchmark(request, left_s))
        if time.monotonic() >= end_s:
            # The CPU is too busy for safe mode as well. What was interrupted counts as disturbed.
            return best or [msgspec.structs.replace(one, stable=False) for one in found]
        if len([one for one in found if one.layer]) < len(request.layers):
            # It crashed in its first step of several rows, as a model would, which then runs in safe mode.
            request = msgspec.structs.replace(request, safe_mode=True)
            found = list(_benchmark(request, end_s - time.monotonic())) or found
        rate = max((one.bytes_per_s for one in found if one.code == _Q8_0), default=0.0)
        if rate > most or not best:
            best = found
            most = rate
        if not rate or not all(one.stable for one in found):
            break
        rates.append(rate)
        alike = [one for one in rates if one >= _ALIKE * max(rates)]
        if len(alike) > 1 and most in alike:
            break
    return best


def _key_and_value(one: BenchmarkResult) -> tuple[str, float]:
    if one.layer is not None:
        return _of_layer(one.layer), one.layer_s
    if one.step_s:
        return (_STEP, one.step_s)
    return (_of_code(one.code), one.bytes_per_s)


def _of_code(code: int) -> str:
    return f"bytes a second of format {code}"


def _of_layer(layer: Layer) -> str:
    flash = ", flash" if layer.flash else ""
    heads = f"{layer.heads}/{layer.kv_heads} heads of {layer.head_width}"
    return f"a layer of {heads}, {layer.kv_type}{flash}, behind format {layer.code}"


def _benchmark(request: BenchmarkRequest, timeout_s: float) -> Iterator[BenchmarkResult]:
    try:
        # Here and not in the helper, whose crash would leave synthetic models of some 50 MB.
        with tempfile.TemporaryDirectory(
            prefix=FOLDER_PREFIX, ignore_cleanup_errors=True
        ) as folder:
            output = run_module(
                "speed.benchmark_process",
                timeout_s=timeout_s,
                stdin=msgspec.json.encode(request),
                environment={"GOMPSPINCOUNT": SPIN, "TMPDIR": folder},
            )
    except OSError:
        return
    for line in output.splitlines():
        try:
            yield msgspec.json.decode(line, type=BenchmarkResult)
        except msgspec.DecodeError:
            return  # it ended in the middle of a line
