"""Which backend runs a model: by what each accepts and what can run here, with the reason in a sentence."""

from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

from localchat.backend_api.interface import Backend
from localchat.errors import LocalchatError, ModelInvalid, UsageError
from localchat.fit.report import Kind, chosen_because

GROUP = "localchat.backends"


class Selection(NamedTuple):
    """The chosen backend, why (fit.reason.placed makes the whole sentence of it), and the library versions
    that decide its text."""

    backend: Backend
    why: str
    versions: tuple[tuple[str, str], ...]


def select_backend(path: Path, wanted: str | None) -> Selection:
    """The backend for the model at `path`. `wanted`: a backend's name, or `module:Class` for one that is not
    installed by entry point. Raises UsageError, ModelInvalid, LocalchatError."""
    if wanted and ":" in wanted:
        module, _, name = wanted.partition(":")
        chosen: Backend = getattr(import_module(module), name)()
        return _selected(chosen, path, asked=True)
    backends = _installed()
    if wanted:
        if wanted not in backends:
            raise UsageError(
                f"no backend is called {wanted!r}",
                hint=f"installed: {', '.join(backends) or 'none'}",
            )
        return _checked(backends[wanted], path)
    fitting = [backend for backend in backends.values() if backend.accepts(path)]
    refusals: list[str] = []
    for backend in fitting:
        can = backend.available()
        if can.ok:
            return _selected(backend, path, refusals=refusals)
        refusals.append(f"{backend.name}: {can.reason} {can.hint}".strip())
    if refusals:
        raise ModelInvalid(f"no backend can run {path.name} here: {'; '.join(refusals)}")
    return _complain(path, backends.values())


def _selected(
    backend: Backend, path: Path, *, asked: bool = False, refusals: Iterable[str] = ()
) -> Selection:
    kind: Kind = "safetensors" if path.is_dir() else "gguf"
    why = chosen_because(backend.name, kind, asked=asked, refusals=refusals)
    return Selection(backend, why, backend.available().versions)


def _complain(path: Path, backends: Iterable[Backend]) -> Selection:
    """Nobody knows this kind of file. The first backend that can run says what is wrong with it."""
    for backend in backends:
        if backend.available().ok:
            return Selection(backend, "", backend.available().versions)
    raise ModelInvalid(f"{path} is no model that an installed backend knows")


def _checked(backend: Backend, path: Path) -> Selection:
    can = backend.available()
    if not can.ok:
        raise LocalchatError(f"{backend.name} cannot run here: {can.reason}", hint=can.hint)
    return _selected(backend, path, asked=True)


def _installed() -> dict[str, Backend]:
    points = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    return {point.name: point.load()() for point in points}
