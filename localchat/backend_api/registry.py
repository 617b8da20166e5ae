"""Installed backends, found by entry point, and the choice of one for a model.

Front ends and the engine process choose here. Finding a backend imports its package root, which does not import
torch or load a native library.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from localchat.backend_api.interface import Availability, Backend, OpenModel
from localchat.errors import LocalchatError, ModelInvalid, UsageError
from localchat.fit.hardware import Machine
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat.fit.report import Kind, chosen_because, kind_name, runner_name
from localchat.model_files.architecture import ModelShape
from localchat.model_files.checkpoint import ModelSummary, read_summary
from localchat.model_files.projector import NO_PROJECTOR, find_projector

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "localchat.backends"
_MIN_CONTEXT = 8192
"""Context from which a model on the GPU beats one with a longer context in RAM."""
_CLEARLY_FASTER = 1.2
"""Factor by which another backend must be faster than the usual one. Estimates are no more accurate."""


class BrokenBackend(Backend):
    """Replaces a backend that cannot be imported. Never available, accepts nothing."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self._reason = reason

    def available(self) -> Availability:
        return Availability(False, self._reason, "install its distribution again, or remove it")

    def accepts(self, path: Path) -> bool:
        return False

    def objection(self, model: ModelSummary) -> str:
        return self._reason

    def open(self, path: Path, notify: Callable[[str], None]) -> OpenModel:
        raise LocalchatError(self._reason)


def find_backends() -> dict[str, Backend]:
    """Return every installed backend by name, with a BrokenBackend for each that cannot be imported."""
    backends: dict[str, Backend] = {}
    for entry_point in _entry_points(tuple(sys.path)):
        try:
            backends[entry_point.name] = entry_point.load()()
        except (ImportError, AttributeError) as problem:
            reason = f"{entry_point.value} cannot be imported: {problem}"
            backends[entry_point.name] = BrokenBackend(entry_point.name, reason)
    return backends


@lru_cache(maxsize=1)
def _entry_points(path: tuple[str, ...]) -> "tuple[EntryPoint, ...]":
    """Return the entry points on this path.

    Cached, because a search takes 10 ms or more, and a list of models needs one for each model. Backends that
    are installed meanwhile are found by the next run.
    """
    from importlib.metadata import entry_points

    return tuple(sorted(entry_points(group=GROUP), key=lambda entry_point: entry_point.name))


def for_kind(backends: Iterable[Backend], kind: Kind) -> list[Backend]:
    """Return the backends that run files of a kind, ordered by their preference for it."""
    fitting = (backend for backend in backends if kind in backend.kinds)
    return sorted(fitting, key=lambda backend: backend.kinds.index(kind))


class BackendChoice(NamedTuple):
    """The backend that would run a model."""

    backend: Backend
    why: str
    """First half of a sentence that fit.report.placed completes."""
    availability: Availability
    others: tuple[str, ...] = ()
    """Other backends that could run the model, as --backend takes them."""


def choose_for_model(
    model: ModelSummary, kind: Kind, requested: str | None = None
) -> BackendChoice:
    """Choose the backend for a model by its header, local or on a hub.

    A backend that can run here precedes one that cannot. `requested`: name of a backend. Raises UsageError,
    LocalchatError.
    """
    backends = find_backends()
    fitting = for_kind(backends.values(), kind)
    if requested is None and not fitting:
        raise LocalchatError(f"no installed backend runs {kind_name(kind)}")
    willing = [backend for backend in fitting if not backend.objection(model)]
    if requested:
        choice = _named(backends, kind, requested)
    else:
        choice = _first(willing or fitting, kind)
    others = (
        backend for backend in willing if backend is not choice.backend and backend.available().ok
    )
    return choice._replace(others=tuple(backend.name for backend in others))


def choose_for_file(path: Path, requested: str | None = None) -> BackendChoice:
    """Choose the backend for the file or folder at `path`. One that can run here goes first.

    `requested`: name of a backend, or `module:Class` of one that is not installed. Raises UsageError,
    LocalchatError.
    """
    kind: Kind = "safetensors" if path.is_dir() else "gguf"
    if requested and ":" in requested:
        module, _, name = requested.partition(":")
        return _chosen(getattr(import_module(module), name)(), kind, is_requested=True)
    backends = find_backends()
    if requested:
        return _named(backends, kind, requested)
    fitting = [backend for backend in for_kind(backends.values(), kind) if backend.accepts(path)]
    if not fitting:
        raise ModelInvalid(f"{path} is not a format that any installed backend supports")
    return _first(fitting, kind)


def choose_for_load(
    model: ModelSummary,
    kind: Kind,
    options: LoadOptions,
    machine: Machine,
    requested: str | None = None,
) -> BackendChoice:
    """Choose a backend for these options on this machine. See choose_for_model.

    A backend that holds the whole model on a GPU replaces one that would compute on the CPU, because many
    builds of llama.cpp cannot use a GPU. If both hold it there, a clearly faster one replaces the usual one,
    except for a single answer, because llama.cpp loads in half the time. Raises UsageError, LocalchatError.
    """
    choice = choose_for_model(model, kind, requested)
    if requested or not choice.others or not machine.gpus or not _may_change(options):
        return choice
    plan = _plan(choice.backend, model, options, machine)
    if plan is None:
        return choice
    usual = choice.backend.name
    for name in choice.others:
        backend = find_backends()[name]
        other = _plan(backend, model, options, machine)
        if other is None or not _whole_on_gpu(other):
            continue
        if not _whole_on_gpu(plan):
            because = _computes_on_cpu(choice.backend, plan, other)
        elif options.single_request_tokens or other.context_tokens < plan.context_tokens:
            because = ""
        else:
            threads = options.threads or machine.cores
            rate = _rate(choice.backend, plan, model, threads)
            other_rate = _rate(backend, other, model, threads)
            because = _is_slower(choice.backend, rate, other_rate)
        if because:
            if _sees(model, options):
                because += f" (though it alone reads pictures and sound: --backend {usual})"
            return _instead(choice, backend, kind, because)
    return choice


def _sees(model: ModelSummary, options: LoadOptions) -> bool:
    """Return whether an encoder of pictures or sound lies beside a model."""
    if not isinstance(model, ModelShape) or model.header is None:
        return False
    return find_projector(model.header, options.mmproj) is not None


def _computes_on_cpu(usual: Backend, plan: MemoryPlan, other: MemoryPlan) -> str:
    """Return why a plan is worse than one on a GPU. Empty: its longer context is worth more."""
    if plan.fits and other.context_tokens < min(plan.context_tokens, _MIN_CONTEXT):
        return ""
    part = "a part of it" if plan.gpu_layers else "it"
    return f"{runner_name(usual.name)} would compute {part} on the CPU here"


def _is_slower(usual: Backend, rate: float, other_rate: float) -> str:
    """Return why a plan on a GPU is worse than a faster one. Empty: not clearly slower, or a rate is unknown
    (0)."""
    if not 0 < _CLEARLY_FASTER * rate <= other_rate:
        return ""
    name = runner_name(usual.name)
    return f"{name} is expected to generate {rate:.0f} tok/s here, not {other_rate:.0f}"


def _rate(backend: Backend, plan: MemoryPlan, model: ModelSummary, threads: int) -> float:
    """Return the expected tok/s with all layers on the GPU. 0: unknown, or not supported by any run."""
    estimate = backend.expected_rate(model, plan, threads)
    if estimate is None or estimate.untried:
        return 0.0
    return estimate.tokens_per_s


def _plan(
    backend: Backend, model: ModelSummary, options: LoadOptions, machine: Machine
) -> MemoryPlan | None:
    """Plan a load. None: the backend rejects the options, or plans only open models."""
    try:
        return backend.plan(model, options, machine)
    except LocalchatError:
        return None


def _instead(choice: BackendChoice, backend: Backend, kind: Kind, because: str) -> BackendChoice:
    """Return a choice of `backend` instead. `because`: what is wrong with the other, as half a sentence."""
    others = tuple(choice.backend.name if name == backend.name else name for name in choice.others)
    why = f"{because}, so {kind_name(kind)} runs on {runner_name(backend.name)}"
    return BackendChoice(backend, why, backend.available(), others)


def _may_change(options: LoadOptions) -> bool:
    """Return whether every backend supports the options."""
    free = options.gpu_layers in ("auto", "all") and options.experts_on_cpu == "auto"
    # llama.cpp alone sees and hears.
    reads_text = options.mmproj in (None, NO_PROJECTOR)
    plain = options.draft is None and not options.anyway and not options.lora
    return free and plain and reads_text


def _whole_on_gpu(plan: MemoryPlan) -> bool:
    return plan.fits and plan.gpu_layers >= plan.layers > 0 and not plan.experts_on_cpu


def usable_machine() -> Machine:
    """Return this machine, with every GPU that an installed backend can use. May take a second."""
    from localchat.fit.hardware import read_machine

    machine = read_machine()
    for backend in find_backends().values():
        if backend.available().ok:
            machine = backend.with_gpus(machine)
    return machine


def require_for_file(
    path: Path, requested: str | None = None, options: LoadOptions | None = None
) -> BackendChoice:
    """Choose a backend that can run a file here with these options. See choose_for_file.

    Raises UsageError, ModelInvalid, LocalchatError.
    """
    try:
        choice = choose_for_file(path, requested)
    except ModelInvalid:
        # The backend's `open` explains what is wrong with the file.
        for backend in find_backends().values():
            if (availability := backend.available()).ok:
                return BackendChoice(backend, "", availability)
        raise
    if choice.availability.ok:
        if requested or options is None:
            return choice
        return _for_load(path, choice, options)
    if requested:
        raise LocalchatError(
            f"{choice.backend.name} cannot run here: {choice.availability.reason}",
            hint=choice.availability.hint,
        )
    fitting = [backend for backend in find_backends().values() if backend.accepts(path)]
    reasons = [_refusal(backend.name, backend.available(), hint=True) for backend in fitting]
    raise ModelInvalid(f"no backend can run {path.name} here: {'; '.join(reasons)}")


def _for_load(path: Path, choice: BackendChoice, options: LoadOptions) -> BackendChoice:
    """Call choose_for_load for a file, if several backends can run it. Finding GPUs takes time."""
    others = (
        backend for backend in find_backends().values() if backend.name != choice.backend.name
    )
    if not any(backend.accepts(path) and backend.available().ok for backend in others):
        return choice
    try:
        model = read_summary(path, dummy_weights=options.dummy_weights)
    except LocalchatError:
        # The backend's `open` explains what is wrong with the file.
        return choice
    kind: Kind = "safetensors" if path.is_dir() else "gguf"
    return choose_for_load(model, kind, options, usable_machine())


def _named(backends: Mapping[str, Backend], kind: Kind, requested: str) -> BackendChoice:
    if requested not in backends:
        raise UsageError(
            f"no backend is called {requested!r}",
            hint=f"installed: {', '.join(backends) or 'none'}",
        )
    return _chosen(backends[requested], kind, is_requested=True)


def _first(fitting: Sequence[Backend], kind: Kind) -> BackendChoice:
    """Return the first backend that can run here, with the reasons against those before it.

    If none can, return the first one.
    """
    refusals: list[str] = []
    for backend in fitting:
        availability = backend.available()
        if availability.ok:
            why = chosen_because(backend.name, kind, is_requested=False, refusals=refusals)
            return BackendChoice(backend, why, availability)
        refusals.append(_refusal(backend.name, availability))
    return _chosen(fitting[0], kind, is_requested=False)


def _refusal(name: str, availability: Availability, *, hint: bool = False) -> str:
    text = f"{name}: {availability.reason}"
    if hint:
        text += f" {availability.hint}"
    return text.strip()


def _chosen(backend: Backend, kind: Kind, *, is_requested: bool) -> BackendChoice:
    return BackendChoice(
        backend, chosen_because(backend.name, kind, is_requested=is_requested), backend.available()
    )
