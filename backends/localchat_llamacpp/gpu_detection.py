"""Detects GPUs through llama.cpp where NVIDIA's driver reports none: AMD, Intel, integrated.

Run as a module it prints one JSON list of devices (see helper_process.py).
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace

from localchat.backend_api.interface import Device
from localchat.fit.hardware import Gpu, Machine
from localchat_llamacpp.build_advice import can_offload, devices
from localchat_llamacpp.helper_process import run_module

_TIMEOUT_S = 20.0


def add_gpus(machine: Machine, ask: Callable[[], Iterable[Device]]) -> Machine:
    """The machine with the devices that `ask` finds.

    GPUs with memory of their own are added; where there are only integrated ones, their memory is the RAM.
    Asks only where no GPU is known: to report its free memory, CUDA takes 0.5 GB of each GPU for as long as
    the process lives.
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
    """The same without loading the library here.

    A helper process looks, about a second, and only where this build could use what it finds.
    """
    if machine.gpus or machine.unified_memory or not can_offload():
        return machine
    try:
        output = run_module("gpu_detection", timeout_s=_TIMEOUT_S)
        detected = [Device(**fields) for fields in json.loads(output)]
    except (OSError, ValueError, TypeError):
        return machine  # it crashed or timed out: the load itself finds out
    return add_gpus(machine, lambda: detected)


if __name__ == "__main__":
    print(json.dumps([asdict(one) for one in devices()]))  # noqa: T201
