"""How fast this build multiplies a matrix by a vector here, by number format: what decoding consists of.

Run as a process of its own (`python -m localchat_llamacpp.probe THREADS CODE …`): native code may crash, and
a door stays light. Prints one JSON object: bytes of weights a second by ggml's type number.
"""

import ctypes
import json
import sys
import time
from typing import Any

from localchat.fit.ggml_types import NUMBER_FORMATS

_WIDTH = 4096
_MATRIX_BYTES = 64 << 20
"""Larger than most last-level caches, so that weights come from memory as they do in a model."""
_LEAST_S, _MOST_S = 0.05, 0.6
_AGREE = 3
"""Runs within a twentieth of the best that make it believable."""
_F32 = 0


class _Parameters(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def measure(codes: list[int], threads: int) -> dict[str, float]:
    """Bytes a second by type number. Loads the library."""
    ggml = _ggml()
    cpu = ggml.ggml_backend_cpu_init()
    ggml.ggml_backend_cpu_set_n_threads(cpu, threads)
    return {str(code): _rate(ggml, cpu, code) for code in codes}


def _ggml() -> Any:  # noqa: ANN401  a native library
    from localchat_llamacpp.library import library

    native = library().api._lib
    pointer = ctypes.c_void_p
    native.ggml_init.restype, native.ggml_init.argtypes = pointer, [_Parameters]
    native.ggml_free.argtypes = [pointer]
    native.ggml_new_tensor_2d.restype = pointer
    native.ggml_new_tensor_2d.argtypes = [pointer, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    native.ggml_mul_mat.restype = pointer
    native.ggml_mul_mat.argtypes = [pointer, pointer, pointer]
    native.ggml_new_graph.restype, native.ggml_new_graph.argtypes = pointer, [pointer]
    native.ggml_build_forward_expand.argtypes = [pointer, pointer]
    native.ggml_get_data.restype, native.ggml_get_data.argtypes = pointer, [pointer]
    native.ggml_backend_cpu_init.restype = pointer
    native.ggml_backend_cpu_set_n_threads.argtypes = [pointer, ctypes.c_int]
    native.ggml_backend_graph_compute.argtypes = [pointer, pointer]
    return native


def _rate(ggml: Any, cpu: int, code: int) -> float:  # noqa: ANN401
    form = NUMBER_FORMATS[code]
    row = _WIDTH // form.block * form.block_bytes
    rows = _MATRIX_BYTES // row // 256 * 256
    context = ggml.ggml_init(_Parameters(rows * row + (32 << 20), None, False))
    try:
        weights = ggml.ggml_new_tensor_2d(context, code, _WIDTH, rows)
        vector = ggml.ggml_new_tensor_2d(context, _F32, _WIDTH, 1)
        # Zeros in every byte are valid in every format; the pages must be real ones.
        ctypes.memset(ggml.ggml_get_data(weights), 0, rows * row)
        ctypes.memset(ggml.ggml_get_data(vector), 0, 4 * _WIDTH)
        graph = ggml.ggml_new_graph(context)
        ggml.ggml_build_forward_expand(graph, ggml.ggml_mul_mat(context, weights, vector))
        return rows * row / _best(ggml, cpu, graph)
    finally:
        ggml.ggml_free(context)


def _best(ggml: Any, cpu: int, graph: int) -> float:  # noqa: ANN401
    """The shortest of several runs: others on this machine only ever make one longer. On a busy machine it goes
    on until some agree, or for so long."""
    times: list[float] = []
    begin = time.perf_counter()
    while (elapsed := time.perf_counter() - begin) < _MOST_S:
        if elapsed >= _LEAST_S and sum(one <= 1.05 * min(times) for one in times) >= _AGREE:
            break
        start = time.perf_counter()
        ggml.ggml_backend_graph_compute(cpu, graph)
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    print(json.dumps(measure([int(code) for code in sys.argv[2:]], int(sys.argv[1]))))  # noqa: T201
