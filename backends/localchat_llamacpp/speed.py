"""How fast a model will write here, before it is loaded: an estimate, and said to be one.

One token reads the weights once, so its time is their bytes over the rate at which this build multiplies a
matrix by a vector in that format (probe.py), and a little for everything else.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from statistics import median

from localchat.fit.ggml_types import NUMBER_FORMATS
from localchat.fit.gguf_header import Header
from localchat.fit.machine import Machine
from localchat.fit.plan import MemoryPlan

_PATIENCE_S = 20.0
_PRODUCTS_SHARE = 0.85
"""Of a step's time, what the matrix products take (0.79 to 0.97 for models of 0.5 to 1.2 B on two cores)."""
_READING_SHARE = 0.9
"""Of a card's bandwidth, what its matrix products reach."""
_LAYER_S = 100e-6
"""What a layer on a card takes besides: its many small kernels, one behind the other (7B shapes of 28 layers
on an H200: 3.9 ms a token, of which reading takes 0.9)."""
_LEAST_SHARE, _MOST_SHARE = 0.2, 1.3
_SPIN = "2000"
"""See the child's environment: threads that spin longer starve each other on a busy machine."""


def expected_rate(
    header: Header, threads: int, past: Sequence[tuple[Header, float]] = ()
) -> float | None:
    """Tokens a second of one request with a short context, every layer on the CPU and nothing else
    computing. Takes about a second. None where the probe fails, which a native crash may make it do.

    past: models that ran here with as many threads, and their tokens a second. The share of a step that
    products take is then theirs (the median), because it is this machine's.
    """
    work = bytes_per_token(header)
    known = [(bytes_per_token(model), rate) for model, rate in past]
    codes = sorted({code for each in (work, *(one for one, _ in known)) for code in each})
    rates = _probe(codes, threads) if work else None
    if rates is None:
        return None
    shares = [rate * _products_s(one, rates) for one, rate in known if one]
    return _share(shares) / _products_s(work, rates)


def offloaded_rate(
    header: Header,
    plan: MemoryPlan,
    machine: Machine,
    threads: int,
    past: Sequence[tuple[Header, float]] = (),
) -> float | None:
    """The same with layers on graphics cards, which read their weights one after another at nearly their
    bandwidth, and spend a constant on each layer; what stays in RAM is priced by the probe. past: models that
    ran whole on these cards, whose times correct the estimate. None where a driver does not tell the
    bandwidth."""
    speeds = [gpu.bytes_per_s for gpu in machine.gpus]
    if not speeds or not all(speeds) or not plan.layers:
        return None
    off = [1 / (rate * _on_card_s(one, min(speeds))) for one, rate in past]
    whole_s = _on_card_s(header, min(speeds)) * (median(off) if off else 1.0)
    on_cards = plan.gpu_layers / plan.layers
    if on_cards >= 1:
        return 1 / whole_s
    on_cpu = expected_rate(header, threads)
    return 1 / (on_cards * whole_s + (1 - on_cards) / on_cpu) if on_cpu else None


def _on_card_s(header: Header, bytes_per_s: int) -> float:
    read = sum(bytes_per_token(header).values())
    return read / (_READING_SHARE * bytes_per_s) + _LAYER_S * header.number("block_count")


def _products_s(work: Mapping[int, int], rates: Mapping[int, float]) -> float:
    return sum(count / rates[code] for code, count in work.items())


def _share(measured: Sequence[float]) -> float:
    """Of a step's time, what the products take: measured, where it was, within what is possible. One run
    counts for half, because a run may have been disturbed."""
    if not measured:
        return _PRODUCTS_SHARE
    found = median(measured)
    found = (found + _PRODUCTS_SHARE) / 2 if len(measured) == 1 else found
    return min(max(found, _LEAST_SHARE), _MOST_SHARE)


def bytes_per_token(header: Header) -> dict[int, int]:
    """Bytes of weights that one token reads, by ggml's type number: of experts those in use, and of an input
    embedding nothing unless it is the output too. Vectors are left out."""
    layers = header.number("block_count")
    experts = header.number("expert_count")
    used = max(header.numbers("expert_used_count", layers), default=0)
    tied = not any(tensor.name == "output.weight" for tensor in header.tensors)
    codes = {form.name: code for code, form in NUMBER_FORMATS.items()}
    found: dict[int, int] = {}
    for tensor in header.tensors:
        if len(tensor.shape) < 2 or (tensor.name == "token_embd.weight" and not tied):
            continue
        read = tensor.size_bytes
        if "_exps." in tensor.name and experts:
            read = read * used // experts
        code = codes[tensor.form.name]
        found[code] = found.get(code, 0) + read
    return found


def _probe(codes: list[int], threads: int) -> Mapping[int, float] | None:
    command = [sys.executable, "-m", "localchat_llamacpp.probe", str(threads), *map(str, codes)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "GOMP_SPINCOUNT": _SPIN,
        "GGML_NO_BACKTRACE": "1",
    }
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=_PATIENCE_S, check=True, env=environment
        )
        rates: dict[str, float] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None  # the estimate is left out
    return {int(code): rate for code, rate in rates.items()}
