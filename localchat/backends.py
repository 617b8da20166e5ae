"""The installed backends, found by entry point: ours enter as a stranger's would.

Light: finding imports a backend's package root, which holds no torch and no llama_cpp. What a door may ask
of a backend stands here; running models is waist 2's part of the same object (loop/backend.py).
"""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from localchat.errors import LocalchatError, UsageError

if TYPE_CHECKING:
    from localchat.fit.gguf_header import Header
    from localchat.fit.plan import LoadWish, MemoryPlan

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
    """What a door may ask."""

    @property
    def name(self) -> str: ...

    def available(self) -> Availability:
        """Answers without importing anything heavy."""
        ...

    def accepts(self, path: Path) -> bool:
        """Whether this backend is for the file or folder at `path`, by its beginning or name."""
        ...

    def objection(self, header: "Header") -> str:
        """Why this build cannot run a model, as far as its checked header tells: the end of a sentence, empty
        where nothing speaks against it. Loads no native library."""
        ...

    def plan(self, header: "Header", wish: "LoadWish") -> "MemoryPlan":
        """What a load would take of this machine now, whether or not it fits. Loads no native library.
        Raises UsageError for wishes that this model cannot have."""
        ...

    def expected_rate(self, header: "Header", plan: "MemoryPlan", threads: int) -> float | None:
        """Tokens a second that one request will get at a short context, while nothing else computes: an
        estimate; None where there is none. May take a second. threads: 0 for every physical core."""
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

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self._reason = reason

    def available(self) -> Availability:
        return _Unavailable(False, self._reason, "install its distribution again, or remove it")

    def accepts(self, path: Path) -> bool:
        return False

    def objection(self, header: "Header") -> str:
        return self._reason

    def plan(self, header: "Header", wish: "LoadWish") -> "MemoryPlan":
        raise LocalchatError(self._reason)

    def expected_rate(self, header: "Header", plan: "MemoryPlan", threads: int) -> float | None:
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
    from importlib.metadata import entry_points

    found: dict[str, Backend] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            found[point.name] = point.load()()
        except (ImportError, AttributeError) as problem:
            reason = f"{point.value} cannot be imported: {problem}"
            found[point.name] = BrokenBackend(point.name, reason)
    return found


def backend_for(path: Path, wanted: str | None = None) -> Backend:
    """The backend that would run the model at `path`: the one that is asked for, else the first that accepts
    it, one that can run here before one that cannot. Raises UsageError, LocalchatError."""
    backends = find_backends()
    if wanted is not None:
        if wanted not in backends:
            raise UsageError(
                f"no backend is called {wanted!r}",
                hint=f"installed: {', '.join(backends) or 'none'}",
            )
        return backends[wanted]
    fitting = [backend for backend in backends.values() if backend.accepts(path)]
    if not fitting:
        raise LocalchatError(f"{path} is no model that an installed backend knows")
    return next((backend for backend in fitting if backend.available().ok), fitting[0])
