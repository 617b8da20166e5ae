"""The installed backends, found by entry point: ours enter as a stranger's would.

Light: finding imports a backend's package root, which holds no torch and no llama_cpp. What a door may ask
of a backend stands here; running models is waist 2's part of the same object (loop/backend.py).
"""

import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from localchat.errors import LocalchatError, UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from localchat.fit.hardware import Machine
    from localchat.fit.load_options import LoadOptions
    from localchat.fit.memory_plan import MemoryPlan
    from localchat.fit.report import Kind
    from localchat.fit.speed_history import Estimate, Measures, Past
    from localchat.model_files.checkpoint import Unloaded

GROUP = "localchat.backends"


class Availability(Protocol):
    """Whether a backend can run here. `reason` and `hint` are sentences."""

    @property
    def ok(self) -> bool: ...
    @property
    def reason(self) -> str: ...
    @property
    def hint(self) -> str: ...
    @property
    def versions(self) -> tuple[tuple[str, str], ...]: ...


class Device(Protocol):
    """A device that the backend's library found. `kind`: cpu, gpu, igpu, accel."""

    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def free_bytes(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...


class Facts(Protocol):
    """The build as it is. `library`: its file. `features`: instruction sets. `offload`: whether it can put
    layers on a GPU."""

    @property
    def library(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def features(self) -> frozenset[str]: ...
    @property
    def offload(self) -> bool: ...
    @property
    def devices(self) -> tuple[Device, ...]: ...


class WayOut(Protocol):
    """What a user can do for a better build: a sentence, and the command where there is one, with the
    variables it needs."""

    @property
    def sentence(self) -> str: ...
    @property
    def command(self) -> tuple[str, ...]: ...
    @property
    def environment(self) -> tuple[tuple[str, str], ...]: ...


class Backend(Protocol):
    """What a door may ask. `kinds`: which files it runs; `objection` and `plan` are asked about these only."""

    @property
    def name(self) -> str: ...
    @property
    def kinds(self) -> "tuple[Kind, ...]": ...

    def available(self) -> Availability:
        """Answers without importing anything heavy."""
        ...

    def accepts(self, path: Path) -> bool:
        """Whether this backend is for the file or folder at `path`, by its beginning or name."""
        ...

    def objection(self, model: "Unloaded") -> str:
        """Why this build cannot run a model, as far as its checked header tells: the end of a sentence, empty
        where nothing speaks against it. Loads no native library."""
        ...

    def seen(self, machine: "Machine") -> "Machine":
        """The machine with the GPUs that this build could use and that `read_machine` cannot see. May take a
        second; loads no native library here."""
        ...

    def plan(self, model: "Unloaded", wish: "LoadOptions", machine: "Machine") -> "MemoryPlan":
        """What a load would take of this machine, whether or not it fits. Loads no native library.
        Raises UsageError for wishes that this model cannot have."""
        ...

    def expected_rate(
        self,
        model: "Unloaded",
        plan: "MemoryPlan",
        threads: int,
        past: "Sequence[Past]" = (),
        measures: "Measures" = ...,
    ) -> "Estimate | None":
        """Tokens a second that one request will get at a short context, while nothing else computes: an
        estimate; None where there is none. May take a second. threads: 0 for every physical core. past: runs
        with as many threads and all layers where this plan has them, which correct the estimate. measures: what
        probes found here before, and where new findings are kept."""
        ...

    def build_key(self) -> str:
        """Names the native build and this CPU; safe mode is remembered by it."""
        ...

    def facts(self) -> Facts:
        """Loads the native library. Raises LocalchatError, ImportError, OSError."""
        ...

    def ways_out(self) -> tuple[WayOut, ...]:
        """What could be better here, best first: a rebuild for a GPU that this build cannot use, and both
        ways out of a crash. Loads the native library as `facts` does."""
        ...


class _Unavailable(NamedTuple):
    ok: bool
    reason: str
    hint: str
    versions: tuple[tuple[str, str], ...] = ()


class BrokenBackend:
    """Stands for a backend whose code cannot be imported: never available, accepts nothing."""

    kinds: "tuple[Kind, ...]" = ()

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self._reason = reason

    def available(self) -> Availability:
        return _Unavailable(False, self._reason, "install its distribution again, or remove it")

    def accepts(self, path: Path) -> bool:
        return False

    def objection(self, model: "Unloaded") -> str:
        return self._reason

    def seen(self, machine: "Machine") -> "Machine":
        return machine

    def plan(self, model: "Unloaded", wish: "LoadOptions", machine: "Machine") -> "MemoryPlan":
        raise LocalchatError(self._reason)

    def expected_rate(
        self,
        model: "Unloaded",
        plan: "MemoryPlan",
        threads: int,
        past: "Sequence[Past]" = (),
        measures: "Measures | None" = None,
    ) -> "Estimate | None":
        return None

    def build_key(self) -> str:
        return ""

    def facts(self) -> Facts:
        raise LocalchatError(self._reason)

    def ways_out(self) -> tuple[WayOut, ...]:
        return ()


def find_backends() -> dict[str, Backend]:
    """Every installed backend by its name. One that cannot be imported says so in `available`, so that it
    does not take the others with it."""
    found: dict[str, Backend] = {}
    for point in _points(tuple(sys.path)):
        try:
            found[point.name] = point.load()()
        except (ImportError, AttributeError) as problem:
            reason = f"{point.value} cannot be imported: {problem}"
            found[point.name] = BrokenBackend(point.name, reason)
    return found


@lru_cache(maxsize=1)
def _points(path: tuple[str, ...]) -> "tuple[EntryPoint, ...]":
    """What is installed on this path. Looking takes 10 ms and more, and a list of models looks for each;
    what is installed meanwhile is found by the next run."""
    from importlib.metadata import entry_points

    return tuple(sorted(entry_points(group=GROUP), key=lambda point: point.name))


class Chosen(NamedTuple):
    """The backend that would run a model, and why: fit.reason.placed makes the whole sentence of it.
    `others`: installed backends that could be asked for with --backend."""

    backend: Backend
    why: str
    others: tuple[str, ...] = ()


def backend_for(path: Path, wanted: str | None = None) -> Backend:
    """The backend that would run the model at `path`: the one that is asked for, else the first that accepts
    it, one that can run here before one that cannot. Raises UsageError, LocalchatError."""
    backends = find_backends()
    fitting = [backend for backend in backends.values() if backend.accepts(path)]
    if wanted is None and not fitting:
        raise LocalchatError(f"{path} is no model that an installed backend knows")
    return _choose(backends, fitting, wanted)


def choose_backend(model: "Unloaded", kind: "Kind", wanted: str | None = None) -> Chosen:
    """The backend for a model that is known by its headers alone, here or on a hub; one that can run it
    before one that cannot. Raises UsageError, LocalchatError."""
    from localchat.fit.report import chosen_because, kind_name

    backends = find_backends()
    fitting = [backend for backend in backends.values() if kind in backend.kinds]
    if wanted is None and not fitting:
        raise LocalchatError(f"no installed backend runs {kind_name(kind)}")
    willing = [backend for backend in fitting if not backend.objection(model)]
    found = _choose(backends, willing or fitting, wanted)
    passed = [] if wanted else (willing or fitting)[: (willing or fitting).index(found)]
    refusals = [f"{one.name}: {one.available().reason}" for one in passed]
    why = chosen_because(found.name, kind, asked=wanted is not None, refusals=refusals)
    others = tuple(one.name for one in willing if one is not found and one.available().ok)
    return Chosen(found, why, others)


def _choose(
    backends: dict[str, Backend], fitting: Iterable[Backend], wanted: str | None
) -> Backend:
    if wanted is not None:
        if wanted not in backends:
            raise UsageError(
                f"no backend is called {wanted!r}",
                hint=f"installed: {', '.join(backends) or 'none'}",
            )
        return backends[wanted]
    listed = list(fitting)
    return next((backend for backend in listed if backend.available().ok), listed[0])
