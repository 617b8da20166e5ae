"""Compiles the products of a quantized model ahead, in parallel, where Triton's cache lacks them.

One of W4 takes some eight seconds; a model of one shape needs about thirty, by row counts: compiled one after
the other, when they are first needed, they would stop a conversation again and again. A file in Triton's
cache says that all were compiled; what is in the cache costs nothing later.

    python -m localchat_cuda.warming JOBS      compiles a JSON list of jobs, and runs nothing on the GPU
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from localchat_cuda.config import ModelConfig
from localchat_cuda.kernels import (
    w4,
    w4_hopper_plan,
    w4_pack,
    w4_plan,
    w8,
    w8_pack,
)
from localchat_cuda.kernels.w4 import packed_rows
from localchat_cuda.kernels.w8_pack import W8
from localchat_cuda.layout import BUCKETS, PROMPT_BUCKETS
from localchat_cuda.weights import product_shapes

_PATIENCE_S = 900
_ROWS_OF_BYTES = (64, 32, 16, 8, 1)
"""One for each kernel of a weight of bytes."""


class Job(NamedTuple):
    """A product to compile: weight N x K for so many rows; `normed`: its rows are divided by their rms.
    bytes: of weights of a byte, what shares a scale (`row`, `block`), or `head`; empty: W4. half: the type of
    their rows. gated: gate and up, by their activation; empty: partial sums."""

    n: int
    k: int
    rows: int
    normed: bool = False
    bytes: str = ""
    half: str = ""
    gated: str = ""


def jobs_for(config: ModelConfig, device: torch.device, *, head_int8: bool = False) -> list[Job]:
    """One job for each kernel that steps of this model can need, the slowest to compile first."""
    found = _packed(config, device) if config.packed else []
    how = config.quantization
    if how is not None and not how.packed:
        kind = "block" if how.group else "row"
        shapes = {(sum(parts), k) for parts, k in product_shapes(config).values()}
        found += _of_bytes(sorted(shapes), kind, config)
    if head_int8:
        found += _of_bytes([(config.vocabulary, config.hidden)], "head", config)
    return found


def _of_bytes(shapes: list[tuple[int, int]], kind: str, config: ModelConfig) -> list[Job]:
    return [
        Job(n, k, rows, False, kind, config.dtype) for n, k in shapes for rows in _ROWS_OF_BYTES
    ]


def _packed(config: ModelConfig, device: torch.device) -> list[Job]:
    found: dict[object, Job] = {}
    most = packed_rows(device)
    rows = sorted(each for each in {*BUCKETS, *PROMPT_BUCKETS} if each <= most)
    for name, (parts, k) in product_shapes(config).items():
        n, normed = sum(parts), name in ("qkv", "gate_up")
        gated = config.activation if name == "gate_up" else ""
        for count in rows:
            form = w4_plan.form_for(count)
            cut = w4.cut_for(count, n, k, device, gated=bool(gated))
            if isinstance(cut, w4_hopper_plan.Cut):
                cut = cut._replace(splits=1)  # one kernel for any number
            job = Job(n, k, count, normed, gated=gated)
            found.setdefault((n, k, form, cut, normed, gated), job)
    return sorted(found.values(), key=lambda job: -job.rows)


def compile_ahead(
    config: ModelConfig,
    device: torch.device,
    say: Callable[[str], None],
    *,
    head_int8: bool = False,
) -> None:
    """Compile what is missing. What fails here is compiled when it is first needed."""
    jobs = jobs_for(config, device, head_int8=head_int8)
    if not jobs:
        return
    text = json.dumps(
        [asdict(config), jobs, triton.__version__, torch.cuda.get_device_name(device)]
    )
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    mark = Path(triton.knobs.cache.dir) / f"localchat-{digest}"
    if mark.exists():
        return
    count = max(1, min(len(jobs), (os.cpu_count() or 2) - 1, _by_memory(device)))
    say(f"{len(jobs)} kernels for this model are compiled, once, by {count} processes.")
    shares = [jobs[i::count] for i in range(count)]
    command = [sys.executable, "-m", "localchat_cuda.warming"]
    started = [
        subprocess.Popen(
            [*command, json.dumps(share)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        for share in shares
    ]
    try:
        statuses = [each.wait(_PATIENCE_S) for each in started]
    finally:
        for each in started:
            each.kill()
    if not any(statuses):
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def _by_memory(device: torch.device) -> int:
    """Processes whose GPU contexts fit into half of what is free."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free // 2 // 600_000_000)


def _compile(job: Job) -> None:
    device = torch.device("cuda", 0)
    n, k, m, normed = job[:4]
    if job.bytes:
        codes = torch.uint8 if job.bytes == "head" else w8_pack.E4M3
        scales = (-(-n // 128), k // 128) if job.bytes == "block" else (n,)
        held = W8(torch.empty(n, k, dtype=codes, device=device), torch.empty(scales, device=device))
        w8.product(torch.empty(m, k, dtype=getattr(torch, job.half), device=device), held)
        return
    weight = w4_pack.W4(
        torch.empty(n // 16, k // 128, 1024, dtype=torch.int8, device=device),
        torch.empty(n // 16, k // 128, 16, dtype=torch.int32, device=device),
    )
    squares = torch.empty(m, k // 128, device=device) if normed else None
    rows = w4.empty_rows(m, k, device)
    if job.gated:
        into, gelu = w4.empty_rows(m, n // 2, device), job.gated == "gelu_tanh"
        w4.gated_product(rows, weight, into, squares=squares, gelu=gelu)
    else:
        w4.product(rows, weight, squares=squares)


def _only_compile() -> None:
    """From here on, a launch in this process compiles into Triton's cache and runs nothing."""
    run = triton.runtime.jit.JITFunction.run
    triton.runtime.jit.JITFunction.__getitem__ = lambda self, grid: (
        lambda *a, **o: run(self, *a, grid=grid, warmup=True, **o)
    )


def _parsed(text: str) -> Iterator[Job]:
    return (Job(*each) for each in json.loads(text))


if __name__ == "__main__":
    _only_compile()
    for wanted in _parsed(sys.argv[1]):
        _compile(wanted)
