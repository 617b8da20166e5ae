"""The installed backends, found by entry point: ours enter as a stranger's would.

Light: finding imports a backend's package root, which holds no torch and no llama_cpp.
"""

from collections.abc import Mapping
from typing import Protocol

from localchat.errors import LocalchatError

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


class Backend(Protocol):
    """What a door may ask of a backend; running models is waist 2's part of the same object."""

    @property
    def name(self) -> str: ...

    def available(self) -> Availability:
        """Answers without importing anything heavy."""
        ...

    def facts(self) -> Mapping[str, str]:
        """The build as it is: devices, instruction sets, library file; values in words. May load the
        native library; raises LocalchatError where that fails."""
        ...

    def rebuild_command(self) -> str:
        """The shell command that builds its native part for this machine; empty where nothing would
        change."""
        ...


def find_backends() -> dict[str, Backend]:
    """Every installed backend by its name. Raises LocalchatError naming one that cannot be imported."""
    from importlib.metadata import entry_points

    found: dict[str, Backend] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            found[point.name] = point.load()()
        except (ImportError, AttributeError) as problem:
            raise LocalchatError(
                f"the backend {point.name} ({point.value}) cannot be imported: {problem}",
                hint="install its distribution again, or remove it",
            ) from problem
    return found
