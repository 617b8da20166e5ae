"""Graphics cards as llama.cpp finds them where NVIDIA's driver tells of none: AMD, Intel, integrated.

Run as a process of its own (`python -m localchat_llamacpp.gpu_detection`): native code may crash, and front
ends load none. Prints one JSON list of devices.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace

from localchat.backend_api.interface import Device
from localchat.fit.hardware import Gpu, Machine
from localchat_llamacpp.build_advice import can_offload, devices

_PATIENCE_S = 20.0


def add_gpus(machine: Machine, ask: Callable[[], Iterable[Device]]) -> Machine:
    """The machine with the devices of the library that runs: cards with memory of their own; where there are
    only integrated ones, their memory is the RAM. Asked only where none are known: to tell its free memory,
    CUDA takes 0.5 GB of each card for as long as the process lives."""
    if machine.gpus or machine.unified_memory:
        return machine
    listed = list(ask())
    cards = [one for one in listed if one.kind == "gpu" and one.total_bytes]
    if cards:
        gpus = tuple(
            Gpu(number, one.description or one.name, one.total_bytes, one.free_bytes)
            for number, one in enumerate(cards)
        )
        return replace(machine, gpus=gpus, gpu_note="")
    if any(one.kind == "igpu" for one in listed):
        return replace(machine, unified_memory=True)
    return machine


def detect_gpus(machine: Machine) -> Machine:
    """The same without loading the library here: a process of its own is asked, about a second, and only where
    this build could use what it finds."""
    if machine.gpus or machine.unified_memory or not can_offload():
        return machine
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "GGML_NO_BACKTRACE": "1",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "localchat_llamacpp.gpu_detection"],
            capture_output=True,
            timeout=_PATIENCE_S,
            check=True,
            env=environment,
        )
        told = [Device(**one) for one in json.loads(done.stdout)]
    except (OSError, subprocess.SubprocessError, ValueError, TypeError):
        return machine  # as if there were none: the load itself finds out
    return add_gpus(machine, lambda: told)


if __name__ == "__main__":
    print(json.dumps([asdict(one) for one in devices()]))  # noqa: T201
