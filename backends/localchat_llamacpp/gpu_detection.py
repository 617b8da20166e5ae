"""Detects GPUs through llama.cpp if NVIDIA's driver reports none: AMD, Intel, integrated.

Run as a program, the module prints a JSON list of devices. Native code may crash, so callers load none of it.
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

_TIMEOUT_S = 20.0


def add_gpus(machine: Machine, ask: Callable[[], Iterable[Device]]) -> Machine:
    """Return the machine with the devices that `ask` returns.

    Adds GPUs with memory of their own. Integrated GPUs alone mean unified memory. Asks only if no GPU is known,
    because to report free memory, CUDA takes 0.5 GB of each GPU until the process ends.
    """
    if machine.gpus or machine.unified_memory:
        return machine
    listed = list(ask())
    gpus_found = [device for device in listed if device.kind == "gpu" and device.total_bytes]
    if gpus_found:
        gpus = tuple(
            Gpu(number, device.description or device.name, device.total_bytes, device.free_bytes)
            for number, device in enumerate(gpus_found)
        )
        return replace(machine, gpus=gpus, gpu_note="")
    if any(device.kind == "igpu" for device in listed):
        return replace(machine, unified_memory=True)
    return machine


def detect_gpus(machine: Machine) -> Machine:
    """Return the machine with its GPUs, without loading the library in this process.

    Runs a helper process for about a second, if this build could use a GPU.
    """
    if machine.gpus or machine.unified_memory or not can_offload():
        return machine
    try:
        output = _run_as_program()
        detected = [Device(**fields) for fields in json.loads(output)]
    except (OSError, ValueError, TypeError):
        return machine  # it crashed or timed out, which the load itself will report
    return add_gpus(machine, lambda: detected)


def _run_as_program() -> bytes:
    """Return the stdout of this module, run as a program, even if it crashes. Raises OSError."""
    try:
        return subprocess.run(
            [sys.executable, "-m", __name__],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "GGML_NO_BACKTRACE": "1",
            },
        ).stdout
    except subprocess.TimeoutExpired as slow:
        return slow.stdout or b""


if __name__ == "__main__":
    print(json.dumps([asdict(device) for device in devices()]))  # noqa: T201
