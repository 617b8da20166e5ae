"""Report of `localchat doctor`, as data and as text."""

import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from localchat import __version__
from localchat.backend_api.interface import Backend, Device, Remedy
from localchat.backend_api.registry import find_backends, for_kind
from localchat.cli.context import AppContext
from localchat.cli.output import table
from localchat.config.paths import CRASH_RECORD, Paths, find_paths
from localchat.engine.local.crash_record import CrashRecord
from localchat.errors import LocalchatError
from localchat.fit.report import Kind, kind_name, runner_name
from localchat.sanitize import sanitize_line
from localchat.units import counted, size


class BackendDiagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """State of one backend."""

    name: str
    available: bool
    reason: str
    hint: str
    versions: dict[str, str]
    safe_mode: bool
    trouble: str = ""
    """Why the library cannot be used. Empty if it can."""
    library: str = ""
    version: str = ""
    features: tuple[str, ...] = ()
    offload: bool = False
    devices: tuple[dict[str, str | int], ...] = ()
    remedies: tuple[Remedy, ...] = msgspec.field(default=(), name="ways_out")


class GpuMemory(msgspec.Struct, frozen=True):
    """Memory of a GPU as the memory planner counts it."""

    name: str
    free_bytes: int
    total_bytes: int


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `doctor --json` prints.

    Size: one field per fact of the report.
    """

    localchat: str
    python: str
    executable: str
    platform: str
    cpu: str
    threads: int
    cores: int
    memory_total_bytes: int
    memory_available_bytes: int
    gpus: tuple[GpuMemory, ...]
    settings_file: str
    models_dir: str
    state_dir: str
    backends: tuple[BackendDiagnosis, ...]
    choices: tuple[str, ...]
    troubles: tuple[str, ...] = ()
    """Errors in settings, aliases and other files of the user."""


def diagnose(app: AppContext) -> Diagnosis:
    """Inspect the machine and every backend. Failures become part of the report.

    Memory is counted as for every load, within the limits of a container, whatever a library reports.
    """
    from localchat.backend_api.registry import usable_machine

    paths = find_paths(app.environ)
    machine = usable_machine()
    backends = find_backends()
    diagnoses = tuple(_diagnose_backend(backend, paths) for backend in backends.values())
    offload = {diagnosis.name: diagnosis.offload for diagnosis in diagnoses}
    return Diagnosis(
        localchat=__version__,
        python=platform.python_version(),
        executable=sys.executable,
        platform=platform.platform(),
        cpu=machine.cpu_name or platform.machine(),
        threads=os.cpu_count() or 1,
        cores=machine.cores,
        memory_total_bytes=machine.ram_total_bytes,
        memory_available_bytes=machine.ram_free_bytes,
        gpus=tuple(GpuMemory(gpu.name, gpu.free_bytes, gpu.total_bytes) for gpu in machine.gpus),
        settings_file=str(paths.settings_file),
        models_dir=str(paths.models_dir),
        state_dir=str(paths.state_dir),
        backends=diagnoses,
        choices=tuple(_choices(backends, offload)),
        troubles=tuple(_troubles(paths, app.environ)),
    )


def _troubles(paths: Paths, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield errors in settings, models.toml, aliases and folders, and settings without an effect."""
    from localchat.config.settings import from_environment, resolve
    from localchat.config.settings_file import read_settings
    from localchat.models.aliases import read_aliases
    from localchat.models.catalog import read_catalog

    def settings() -> None:
        file = read_settings(paths.settings_file)
        notices.extend(file.notices)
        resolve(file.layer(), from_environment(environ))

    notices: list[str] = []
    for read in (settings, lambda: read_catalog(paths), lambda: read_aliases(paths)):
        try:
            read()
        except LocalchatError as problem:
            yield "; ".join(filter(None, (problem.message, problem.hint)))
        yield from notices
        notices.clear()


def _choices(backends: Mapping[str, Backend], offload: Mapping[str, bool]) -> Iterator[str]:
    """Yield for each kind of model file which backend would run it, and why."""
    kinds: tuple[Kind, ...] = ("gguf", "safetensors")
    for kind in kinds:
        name = kind_name(kind)
        name = name[0].upper() + name[1:]
        candidates = for_kind(backends.values(), kind)
        usable = [backend.name for backend in candidates if backend.available().ok]
        if usable:
            first, *others = usable
            sentence = f"{name} runs on {runner_name(first)}"
            if offload[first]:
                sentence += ", as many layers on the GPU as fit"
            faster = [runner_name(other) for other in others if offload[other]]
            if faster:
                sentence += f", or on {faster[0]} where that is faster"
            yield f"{sentence}."
        elif candidates:
            yield f"{name} cannot be run here: {candidates[0].available().reason}"
        else:
            yield f"{name} cannot be run here, because no installed backend supports it."


def _diagnose_backend(backend: Backend, paths: Paths) -> BackendDiagnosis:
    available = backend.available()
    key = backend.build_key() if available.ok else ""
    crashed_builds = CrashRecord(paths.state_dir / CRASH_RECORD).known()
    diagnosis = BackendDiagnosis(
        name=backend.name,
        available=available.ok,
        reason=available.reason,
        hint=available.hint,
        versions=dict(available.versions),
        safe_mode=bool(key) and key in crashed_builds,
    )
    if not available.ok:
        return diagnosis
    try:
        facts = backend.build_info()
        remedies = backend.remedies()
    except LocalchatError as problem:
        return msgspec.structs.replace(diagnosis, trouble=problem.message, hint=problem.hint)
    except (ImportError, OSError, RuntimeError) as problem:
        return msgspec.structs.replace(diagnosis, trouble=str(problem))
    return msgspec.structs.replace(
        diagnosis,
        library=facts.library,
        version=facts.version,
        features=tuple(sorted(facts.features)),
        offload=facts.offload,
        devices=tuple(map(_device_record, facts.devices)),
        remedies=remedies,
    )


def _device_record(device: Device) -> dict[str, str | int]:
    """Return a device as the library of the backend describes it.

    The memory of a CPU is omitted. It is the RAM, and some libraries report all of it as free.
    """
    record: dict[str, str | int] = {
        "name": device.name,
        "description": device.description,
        "kind": device.kind,
    }
    if device.kind == "cpu":
        return record
    return record | {"free_bytes": device.free_bytes, "total_bytes": device.total_bytes}


def sentences(diagnosis: Diagnosis) -> Iterator[str]:
    """Format the diagnosis for a terminal."""
    cores = f"{counted(diagnosis.cores, 'core')}, {counted(diagnosis.threads, 'thread')}"
    free = _free(diagnosis.memory_available_bytes, diagnosis.memory_total_bytes)
    rows = (
        ("localchat", diagnosis.localchat),
        ("Python", f"{diagnosis.python} ({diagnosis.executable})"),
        ("platform", diagnosis.platform),
        ("CPU", f"{diagnosis.cpu}, {cores}"),
        ("memory", free),
        *_gpu_rows(diagnosis.gpus),
        ("settings", diagnosis.settings_file),
        ("models", diagnosis.models_dir),
        ("state", diagnosis.state_dir),
    )
    yield from _fact_lines(rows)
    if diagnosis.troubles:
        yield ""
        yield from (f"Error: {sanitize_line(trouble)}" for trouble in diagnosis.troubles)
    yield ""
    yield from diagnosis.choices
    for backend in diagnosis.backends:
        yield ""
        yield from _backend_sentences(backend)


def _gpu_rows(gpus: Sequence[GpuMemory]) -> Iterator[tuple[str, str]]:
    """Yield a row for each GPU, with its number if there are several."""
    for number, gpu in enumerate(gpus):
        label = f"GPU {number}" if len(gpus) > 1 else "GPU"
        yield label, f"{gpu.name}, {_free(gpu.free_bytes, gpu.total_bytes)}"


def _backend_sentences(backend: BackendDiagnosis) -> Iterator[str]:
    state = "available" if backend.available else "not available"
    yield f"backend {backend.name}: {state}"
    yield from _fact_lines(row for row in _backend_rows(backend) if row[1])
    if backend.remedies:
        yield "  possible improvements:"
    for remedy in backend.remedies:
        yield f"  - {remedy.sentence}"
        if remedy.rebuild:
            yield f"      localchat doctor --rebuild={remedy.rebuild}"


def _backend_rows(backend: BackendDiagnosis) -> Iterator[tuple[str, str]]:
    yield "why", backend.reason
    yield "to do", backend.hint
    yield "trouble", backend.trouble
    yield "version", backend.version or ", ".join(map(" ".join, backend.versions.items()))
    yield "library", backend.library
    yield "features", " ".join(backend.features)
    if backend.library and backend.offload:
        yield "GPU", "this build can put layers on a GPU"
    elif backend.library:
        yield "GPU", "this build uses no GPU"
    for device in backend.devices:
        yield "device", _device(device)
    if backend.safe_mode:
        yield (
            "safe mode",
            "this build crashed in its warm-up on this machine, and now runs without that code",
        )


def _device(device: dict[str, str | int]) -> str:
    text = f"{device['name']} ({device['kind']}): {device['description']}"
    total = device.get("total_bytes")
    free = device.get("free_bytes")
    if isinstance(total, int) and isinstance(free, int) and total:
        text += f"; reports {_free(free, total)}"
    return text


def _free(free_bytes: int, total_bytes: int) -> str:
    return f"{size(free_bytes)} free of {size(total_bytes)}"


def _fact_lines(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Format names and values below a heading."""
    return table((), ((f"  {name:<9}", value) for name, value in rows))
