"""Installed backends, found by entry point, and the choice of one for a model.

Front ends and the engine process choose here. Finding a backend imports its package root, which holds no
torch and loads no native library.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from localchat.backend_api.interface import Availability, Backend, MinimalBackend, OpenModel
from localchat.errors import LocalchatError, ModelInvalid, UsageError
from localchat.fit.hardware import Machine
from localchat.fit.load_options import LoadOptions
from localchat.fit.memory_plan import MemoryPlan
from localchat.fit.report import Kind, chosen_because, kind_name, runner_name
from localchat.fit.speed import SpeedHistory
from localchat.model_files.checkpoint import ModelSummary, read_summary

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "localchat.backends"
_LEAST_CONTEXT = 8192
"""With a context as long as this a model on the GPU is worth more than one with a longer context in RAM."""
_CLEARLY_FASTER = 1.2
"""Times the speed of the usual backend that another must be expected to have; estimates are no better."""


class BrokenBackend(MinimalBackend):
    """Stands for a backend whose code cannot be imported: never available, accepts nothing."""

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
    """Every installed backend by its name; those that cannot be imported as a BrokenBackend each."""
    found: dict[str, Backend] = {}
    for entry_point in _entry_points(tuple(sys.path)):
        try:
            found[entry_point.name] = entry_point.load()()
        except (ImportError, AttributeError) as problem:
            reason = f"{entry_point.value} cannot be imported: {problem}"
            found[entry_point.name] = BrokenBackend(entry_point.name, reason)
    return found


@lru_cache(maxsize=1)
def _entry_points(path: tuple[str, ...]) -> "tuple[EntryPoint, ...]":
    """Entry points on this path.

    Cached: a look takes 10 ms and more, and a list of models needs one a model. What is installed meanwhile
    is found by the next run.
    """
    from importlib.metadata import entry_points

    return tuple(sorted(entry_points(group=GROUP), key=lambda one: one.name))


def for_kind(backends: Iterable[Backend], kind: Kind) -> list[Backend]:
    """The backends that run files of a kind, those first whose first kind it is."""
    fitting = (backend for backend in backends if kind in backend.kinds)
    return sorted(fitting, key=lambda backend: backend.kinds.index(kind))


class BackendChoice(NamedTuple):
    """The backend that would run a model."""

    backend: Backend
    why: str
    """The first half of a sentence that fit.report.placed ends."""
    availability: Availability
    others: tuple[str, ...] = ()
    """Other backends that could run the model, as --backend takes them."""


def choose_for_model(model: ModelSummary, kind: Kind, asked: str | None = None) -> BackendChoice:
    """The backend for a model known by its header alone, here or on a hub.

    One that can run here goes before one that cannot. asked: a backend's name. Raises UsageError,
    LocalchatError.
    """
    backends = find_backends()
    fitting = for_kind(backends.values(), kind)
    if asked is None and not fitting:
        raise LocalchatError(f"no installed backend runs {kind_name(kind)}")
    willing = [backend for backend in fitting if not backend.objection(model)]
    choice = _named(backends, kind, asked) if asked else _first(willing or fitting, kind)
    others = (one for one in willing if one is not choice.backend and one.available().ok)
    return choice._replace(others=tuple(one.name for one in others))


def choose_for_file(path: Path, asked: str | None = None) -> BackendChoice:
    """The backend for the file or folder at `path`; one that can run here goes first.

    asked: a backend's name, or `module:Class` of one that is not installed. Raises UsageError,
    LocalchatError.
    """
    kind: Kind = "safetensors" if path.is_dir() else "gguf"
    if asked and ":" in asked:
        module, _, name = asked.partition(":")
        return _chosen(getattr(import_module(module), name)(), kind, asked=True)
    backends = find_backends()
    if asked:
        return _named(backends, kind, asked)
    fitting = [one for one in for_kind(backends.values(), kind) if one.accepts(path)]
    if not fitting:
        raise ModelInvalid(f"{path} is not a format that any installed backend supports")
    return _first(fitting, kind)


def choose_for_load(
    model: ModelSummary,
    kind: Kind,
    options: LoadOptions,
    machine: Machine,
    asked: str | None = None,
    history: SpeedHistory | None = None,
) -> BackendChoice:
    """As choose_for_model, for these options on this machine.

    A backend that would compute on the CPU gives way to one that holds the whole model on a GPU: many builds of
    llama.cpp have no use of one. Where both hold it there, the usual one gives way to one that is clearly
    faster, but not for a single answer: llama.cpp loads in half the time. history: past runs of this machine,
    which correct what backends expect. Raises UsageError, LocalchatError.
    """
    choice = choose_for_model(model, kind, asked)
    if asked or not choice.others or not machine.gpus or not _may_change(options):
        return choice
    plan = _plan(choice.backend, model, options, machine)
    if plan is None:
        return choice
    for name in choice.others:
        backend = find_backends()[name]
        other = _plan(backend, model, options, machine)
        if other is None or not _whole_on_gpu(other):
            continue
        if not _whole_on_gpu(plan):
            because = _computes_on_cpu(choice.backend, plan, other)
        elif options.one_answer or other.context_tokens < plan.context_tokens:
            because = ""
        else:
            plans = ((choice.backend, plan), (backend, other))
            threads = options.threads
            rates = (_rate(*each, model, threads or machine.cores, history) for each in plans)
            because = _is_slower(choice.backend, *rates)
        if because:
            return _instead(choice, backend, kind, because)
    return choice


def _computes_on_cpu(usual: Backend, plan: MemoryPlan, other: MemoryPlan) -> str:
    """Half a sentence on why a plan gives way to one whole on a GPU; empty: its longer context counts more."""
    if plan.fits and other.context_tokens < min(plan.context_tokens, _LEAST_CONTEXT):
        return ""
    part = "a part of it" if plan.gpu_layers else "it"
    return f"{runner_name(usual.name)} would compute {part} on the CPU here"


def _is_slower(usual: Backend, rate: float, other_rate: float) -> str:
    """The same for two on a GPU, by tokens a second; empty: not clearly slower, or a rate is unknown (0)."""
    if not 0 < _CLEARLY_FASTER * rate <= other_rate:
        return ""
    name = runner_name(usual.name)
    return f"{name} is expected to write {rate:.0f} tokens a second here, not {other_rate:.0f}"


def _rate(
    backend: Backend,
    plan: MemoryPlan,
    model: ModelSummary,
    threads: int,
    history: SpeedHistory | None,
) -> float:
    """Expected tokens a second with all layers on the GPU; 0: unknown, or a guess that no run supports."""
    past = (
        ()
        if history is None
        else history.past(backend=backend.name, threads=threads, whole_gpu=True)
    )
    found = backend.expected_rate(model, plan, threads, past)
    if found is None or found.untried:
        return 0.0
    return found.tokens_per_s


def _plan(
    backend: Backend, model: ModelSummary, options: LoadOptions, machine: Machine
) -> MemoryPlan | None:
    """None: the backend cannot have these options, or plans only what is open."""
    try:
        return backend.plan(model, options, machine)
    except LocalchatError:
        return None


def _instead(choice: BackendChoice, backend: Backend, kind: Kind, because: str) -> BackendChoice:
    """`backend` in place of a choice. because: half a sentence on what the choice would do."""
    others = tuple(choice.backend.name if one == backend.name else one for one in choice.others)
    why = f"{because}, so {kind_name(kind)} runs on {runner_name(backend.name)}"
    return BackendChoice(backend, why, backend.available(), others)


def _may_change(options: LoadOptions) -> bool:
    """Whether no option asks for what one backend alone has."""
    free = options.gpu_layers in ("auto", "all") and options.experts_on_cpu == "auto"
    return free and options.draft is None and not options.anyway


def _whole_on_gpu(plan: MemoryPlan) -> bool:
    return plan.fits and plan.gpu_layers >= plan.layers > 0 and not plan.experts_on_cpu


def usable_machine() -> Machine:
    """This machine now, with every GPU that an installed backend can use. May take a second."""
    from localchat.fit.hardware import read_machine

    machine = read_machine()
    for backend in find_backends().values():
        if backend.available().ok:
            machine = backend.with_gpus(machine)
    return machine


def require_for_file(
    path: Path,
    asked: str | None = None,
    options: LoadOptions | None = None,
    history: SpeedHistory | None = None,
) -> BackendChoice:
    """As choose_for_file, for a load with these options: the backend can run here. history: as for
    choose_for_load. Raises UsageError, ModelInvalid, LocalchatError."""
    try:
        choice = choose_for_file(path, asked)
    except ModelInvalid:
        # Its `open` explains what is wrong with the file.
        for backend in find_backends().values():
            if (found := backend.available()).ok:
                return BackendChoice(backend, "", found)
        raise
    if choice.availability.ok:
        if asked or options is None:
            return choice
        return _for_load(path, choice, options, history)
    if asked:
        raise LocalchatError(
            f"{choice.backend.name} cannot run here: {choice.availability.reason}",
            hint=choice.availability.hint,
        )
    fitting = [backend for backend in find_backends().values() if backend.accepts(path)]
    reasons = [_refusal(one.name, one.available(), hint=True) for one in fitting]
    raise ModelInvalid(f"no backend can run {path.name} here: {'; '.join(reasons)}")


def _for_load(
    path: Path, choice: BackendChoice, options: LoadOptions, history: SpeedHistory | None
) -> BackendChoice:
    """What choose_for_load says of a file, if there is a choice at all: looking for GPUs takes time."""
    others = (one for one in find_backends().values() if one.name != choice.backend.name)
    if not any(one.accepts(path) and one.available().ok for one in others):
        return choice
    try:
        model = read_summary(path, dummy_weights=options.dummy_weights)
    except LocalchatError:
        return choice  # its `open` explains what is wrong with the file
    kind: Kind = "safetensors" if path.is_dir() else "gguf"
    return choose_for_load(model, kind, options, usable_machine(), history=history)


def _named(backends: Mapping[str, Backend], kind: Kind, asked: str) -> BackendChoice:
    if asked not in backends:
        raise UsageError(
            f"no backend is called {asked!r}",
            hint=f"installed: {', '.join(backends) or 'none'}",
        )
    return _chosen(backends[asked], kind, asked=True)


def _first(fitting: Sequence[Backend], kind: Kind) -> BackendChoice:
    """The first that can run here, with the reasons against those before it.

    Where none can, the first of all.
    """
    refusals: list[str] = []
    for backend in fitting:
        found = backend.available()
        if found.ok:
            why = chosen_because(backend.name, kind, is_requested=False, refusals=refusals)
            return BackendChoice(backend, why, found)
        refusals.append(_refusal(backend.name, found))
    return _chosen(fitting[0], kind, asked=False)


def _refusal(name: str, found: Availability, *, hint: bool = False) -> str:
    return f"{name}: {found.reason} {found.hint if hint else ''}".strip()


def _chosen(backend: Backend, kind: Kind, *, asked: bool) -> BackendChoice:
    return BackendChoice(
        backend, chosen_because(backend.name, kind, is_requested=asked), backend.available()
    )
