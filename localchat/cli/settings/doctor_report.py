"""Report of `localchat doctor`, as data and as text."""

import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from localchat import __version__
from localchat.backend_api.interface import Backend, Device, Remedy
from localchat.backend_api.registry import find_backends, for_kind
from localchat.cli.context import AppContext
from localchat.cli.output import table
from localchat.config.paths import Paths, find_paths
from localchat.engine.local.crash_record import CrashRecord
from localchat.errors import LocalchatError
from localchat.fit.report import Kind, kind_name, runner_name
from localchat.sanitize import sanitize_line
from localchat.units import size


class BackendDiagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """State of one backend."""

    name: str
    available: bool
    reason: str
    hint: str
    versions: dict[str, str]
    safe_mode: bool
    trouble: str = ""
    """Why its library cannot be used; empty if it can."""
    library: str = ""
    version: str = ""
    features: tuple[str, ...] = ()
    offload: bool = False
    devices: tuple[dict[str, str | int], ...] = ()
    remedies: tuple[Remedy, ...] = msgspec.field(default=(), name="ways_out")


class GpuMemory(msgspec.Struct, frozen=True):
    """Memory of a GPU, counted as the memory planner counts it."""

    name: str
    free_bytes: int
    total_bytes: int


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `doctor --json` prints."""

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
    """Inspect the machine and every backend; failures become part of the report.

    Memory is counted as for every load: within the limits of a container, whatever a library reports."""
    from localchat.fit.hardware import read_machine

    paths = find_paths(app.environ)
    machine = read_machine()
    found = find_backends()
    backends = tuple(_ask(backend, paths) for backend in found.values())
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
        backends=backends,
        choices=tuple(_choices(found, {one.name: one.offload for one in backends})),
        troubles=tuple(_troubles(paths, app.environ)),
    )


def _troubles(paths: Paths, environ: Mapping[str, str]) -> Iterator[str]:
    """Errors that other commands would end with: in settings, models.toml, aliases and folders."""
    from localchat.config.settings import from_environment, resolve
    from localchat.config.settings_file import read_settings
    from localchat.models.aliases import read_aliases
    from localchat.models.catalog import read_catalog

    def settings() -> None:
        resolve(read_settings(paths.settings_file).layer(), from_environment(environ))

    for look in (settings, lambda: read_catalog(paths), lambda: read_aliases(paths)):
        try:
            look()
        except LocalchatError as problem:
            yield f"{problem.message}{f'; {problem.hint}' if problem.hint else ''}"


def _choices(backends: Mapping[str, Backend], offload: Mapping[str, bool]) -> Iterator[str]:
    """For each kind of model file, the backend that would run it and why."""
    kinds: tuple[Kind, ...] = ("gguf", "safetensors")
    for kind in kinds:
        what = kind_name(kind)
        fitting = for_kind(backends.values(), kind)
        able = [one.name for one in fitting if one.available().ok]
        if able:
            placing = ", as many layers on the GPU as fit" if offload[able[0]] else ""
            faster = [runner_name(name) for name in able[1:] if offload[name]]
            other = f", or on {faster[0]} where that is faster" if faster else ""
            yield f"{what[0].upper()}{what[1:]} runs on {runner_name(able[0])}{placing}{other}."
        elif fitting:
            yield f"{what[0].upper()}{what[1:]} cannot be run here: {fitting[0].available().reason}"
        else:
            yield f"{what[0].upper()}{what[1:]} cannot be run here: no installed backend is for it."


def _ask(backend: Backend, paths: Paths) -> BackendDiagnosis:
    available = backend.available()
    key = backend.build_key() if available.ok else ""
    remembered = CrashRecord(paths.state_dir / "safe-builds.json").known()
    known = BackendDiagnosis(
        name=backend.name,
        available=available.ok,
        reason=available.reason,
        hint=available.hint,
        versions=dict(available.versions),
        safe_mode=bool(key) and key in remembered,
    )
    if not available.ok:
        return known
    try:
        facts = backend.build_info()
        remedies = backend.remedies()
    except LocalchatError as problem:
        return msgspec.structs.replace(known, trouble=problem.message, hint=problem.hint)
    except (ImportError, OSError, RuntimeError) as problem:
        return msgspec.structs.replace(known, trouble=str(problem))
    return msgspec.structs.replace(
        known,
        library=facts.library,
        version=facts.version,
        features=tuple(sorted(facts.features)),
        offload=facts.offload,
        devices=tuple(map(_device_record, facts.devices)),
        remedies=remedies,
    )


def _device_record(device: Device) -> dict[str, str | int]:
    """A device as the backend's library describes it. The memory of a CPU is left out: it is the RAM, and some
    libraries report all of it as free."""
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
    cores = f"{_count(diagnosis.cores, 'core')}, {_count(diagnosis.threads, 'thread')}"
    free = _free(diagnosis.memory_available_bytes, diagnosis.memory_total_bytes)
    rows = (
        ("localchat", diagnosis.localchat),
        ("Python", f"{diagnosis.python} ({diagnosis.executable})"),
        ("platform", diagnosis.platform),
        ("CPU", f"{diagnosis.cpu}, {cores}"),
        ("memory", free),
        *(
            ("GPU", f"{gpu.name}, {_free(gpu.free_bytes, gpu.total_bytes)}")
            for gpu in diagnosis.gpus
        ),
        ("settings", diagnosis.settings_file),
        ("models", diagnosis.models_dir),
        ("state", diagnosis.state_dir),
    )
    yield from _fact_lines(rows)
    if diagnosis.troubles:
        yield ""
        yield from (f"Wrong: {sanitize_line(trouble)}" for trouble in diagnosis.troubles)
    yield ""
    yield from diagnosis.choices
    for backend in diagnosis.backends:
        yield ""
        yield from _backend_sentences(backend)


def _backend_sentences(backend: BackendDiagnosis) -> Iterator[str]:
    yield f"backend {backend.name}: {'available' if backend.available else 'not available'}"
    yield from _fact_lines(
        row
        for row in (
            ("why", backend.reason),
            ("to do", backend.hint),
            ("trouble", backend.trouble),
            ("version", backend.version or ", ".join(map(" ".join, backend.versions.items()))),
            ("library", backend.library),
            ("features", " ".join(backend.features)),
            ("GPU", _offload(backend) if backend.library else ""),
            *(("device", _device(device)) for device in backend.devices),
            ("safe mode", _SAFE_MODE if backend.safe_mode else ""),
        )
        if row[1]
    )
    if backend.remedies:
        yield "  what could be better:"
    for remedy in backend.remedies:
        yield f"  - {remedy.sentence}"
        if remedy.rebuild:
            yield f"      localchat doctor --rebuild={remedy.rebuild}"


_SAFE_MODE = (
    "remembered: this build crashed in its warm-up on this machine, and runs without that code now"
)


def _offload(backend: BackendDiagnosis) -> str:
    if backend.offload:
        return "this build can put layers on one"
    return "this build uses none"


def _device(device: dict[str, str | int]) -> str:
    text = f"{device['name']} ({device['kind']}): {device['description']}"
    total = device.get("total_bytes")
    free = device.get("free_bytes")
    if isinstance(total, int) and isinstance(free, int) and total:
        text += f"; by its own count {_free(free, total)}"
    return text


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _free(free_bytes: int, total_bytes: int) -> str:
    return f"{size(free_bytes)} free of {size(total_bytes)}"


def _fact_lines(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Format names and values below a heading."""
    return table((), ((f"  {name:<9}", value) for name, value in rows))
