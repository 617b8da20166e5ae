"""Gathers what a user without a model sees first. Plain data, no network."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from localchat.backend_api.registry import usable_machine
from localchat.config.paths import Paths
from localchat.fit.hardware import Machine
from localchat.models.index import Model, read_index
from localchat.models.recommended_models import Recommendation, recommended_models
from localchat.units import counted, size

_OWN: Final = frozenset({"file", "link", "pulled", "alias"})


@dataclass(frozen=True, slots=True)
class FirstRun:
    """Hardware and models to show to a user without a model."""

    hardware: str
    """Line about the hardware."""
    external: tuple[Model, ...]
    """Usable models of other programs."""
    recommendations: tuple[Recommendation, ...]
    """Fast, balanced, best: as many as fit."""


def first_run(paths: Paths, environ: Mapping[str, str], machine: Machine | None = None) -> FirstRun:
    """Gather everything in about a second. Raises LocalchatError for an unreadable catalogue or alias file."""
    machine = machine or usable_machine()
    index = read_index(paths, environ)
    return FirstRun(
        hardware=hardware_line(machine),
        external=tuple(
            model for model in index.models if model.kind == "adopted" and not model.trouble
        ),
        recommendations=recommended_models(paths, machine),
    )


def is_first_run(paths: Paths, environ: Mapping[str, str]) -> bool:
    """Return True if the user has pulled, imported or stored no model yet."""
    return not any(model.kind in _OWN for model in read_index(paths, environ).models)


def hardware_line(machine: Machine) -> str:
    """Return `AMD EPYC 7B13, 2 cores · 8.1 GB of RAM, 6.0 GB free · RTX 4090, 24.0 GB`."""
    cores = counted(machine.cores, "core")
    unified = ""
    if machine.unified_memory:
        unified = ", shared with its GPU"
    parts = [
        ", ".join(part for part in (machine.cpu_name.strip(), cores) if part),
        f"{size(machine.ram_total_bytes)} of RAM{unified}, {size(machine.ram_free_bytes)} free",
    ]
    parts += [
        f"{gpu.name}, {size(gpu.total_bytes)}, {size(gpu.free_bytes)} free" for gpu in machine.gpus
    ]
    if machine.gpu_note:
        parts.append(machine.gpu_note.rstrip("."))
    return " · ".join(parts)
