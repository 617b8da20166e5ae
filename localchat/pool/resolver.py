"""From a client's word to a model of the library and the settings that it is loaded with."""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from localchat.config.paths import Paths
from localchat.config.settings import Settings
from localchat.engine.options import EngineOptions, load_options
from localchat.errors import ModelMissing
from localchat.models.resolve import GUIDE, ResolvedModel, locate_named
from localchat.pool.entry import ModelSpec

if TYPE_CHECKING:
    from localchat.engine.attached.protocol import AttachSpec
    from localchat.models.info.gguf_info import GGUFInfo
    from localchat.models.info.inspect import Inspection

_FRESH_S = 10.0

SettingsFor = Callable[[Iterable[str]], Settings]
"""The settings in force for a model that goes by these names."""


def engine_options(
    model: ResolvedModel, settings: Settings, paths: Paths, *, max_slots: int
) -> EngineOptions:
    """How this model is loaded under these settings. max_slots: requests computed at once."""
    return EngineOptions(
        model=model.path,
        load=load_options(settings, max_slots=max_slots),
        name=model.name,
        backend=settings.backend,
        speculation=settings.speculation,
        sampling=_advised(model, paths),
        state_dir=paths.state_dir,
        remote=model.remote,
    )


def _advised(model: ResolvedModel, paths: Paths) -> dict[str, float]:
    if model.word == GUIDE:
        return {}
    from localchat.models.recommended_sampling import advised_sampling  # reads the catalogue

    return advised_sampling(model, paths).sampling


class KnownModel(msgspec.Struct, frozen=True):
    """A model of the library, as a list of them shows it. created: seconds of the Unix clock. context_train,
    parameters, size_bytes: 0 where nobody knows. abilities: see library.facts."""

    name: str
    created: int
    context_train: int
    architecture: str = ""
    quantization: str = ""
    parameters: int = 0
    size_bytes: int = 0
    abilities: frozenset[str] = frozenset()


class ModelResolver:
    """Finds models by the names of the library, never by a path, which is not a client's to choose; but for
    `own`, the server's own model, which an empty word means too."""

    def __init__(
        self,
        own: ResolvedModel,
        settings_for: SettingsFor,
        paths: Paths,
        environ: Mapping[str, str],
        *,
        max_slots: int = 16,
    ) -> None:
        self.own = own
        self._settings_for = settings_for
        self._paths = paths
        self._environ = environ
        self._max_slots = max_slots
        self._listed: tuple[float, tuple[KnownModel, ...]] = (0.0, ())
        self._read: dict[tuple[Path, int, int], Inspection] = {}
        """Headers by path, date and size of their file."""

    def find(self, word: str) -> ModelSpec:
        """See pool.Finder."""
        mine = word in ("", self.own.name, self.own.word)
        model = (
            self.own
            if mine
            else locate_named(word, self._paths, "asked for by a client", self._environ)
        )
        return ModelSpec(model.name, self._options(model, word))

    def resolve_request(self, spec: "AttachSpec") -> ModelSpec:
        """The model that another program of the owner asks for: its file, and the options that it sets over
        those in force here. Raises ModelMissing, ModelInvalid, UsageError."""
        path = Path(os.fsdecode(spec.model))
        if not path.exists():
            from localchat.engine.local import protocol

            raise ModelMissing(f"there is no file {protocol.sendable(str(path))}")
        same = path.resolve() == self.own.path.resolve()
        model = self.own if same else ResolvedModel(spec.word or spec.name, spec.name, path, "")
        here = self._options(model, spec.word)
        options = replace(
            here, load=spec.load.over(here.load), backend=spec.backend or here.backend
        )
        return ModelSpec(model.name, options)

    def _options(self, model: ResolvedModel, word: str) -> EngineOptions:
        settings = self._settings_for(dict.fromkeys((model.name, model.word, word)))
        return engine_options(model, settings, self._paths, max_slots=self._max_slots)

    @property
    def stale(self) -> bool:
        """Whether `models` is old enough to be asked for again."""
        return time.monotonic() - self._listed[0] > _FRESH_S or not self._listed[1]

    def models(self) -> tuple[KnownModel, ...]:
        """Every model that can be asked for, as last looked, the own one first."""
        return self._listed[1] or (self._known(self.own.name, self.own.path, None),)

    def look(self) -> None:
        """Read the library anew; the header of each new file, with its vocabulary, takes some 0.2 s. Raises
        LocalchatError, OSError."""
        from localchat.models.index import Model, read_shelf
        from localchat.models.info.inspect import inspect

        models = read_shelf(self._paths, self._environ).models
        own = Model(self.own.name, "file", "", None if self.own.remote else self.own.path)
        read = {}
        found = {own.name: self._known(own.name, self.own.path, None)}
        for model in (own, *models):
            if model.path is None or model.trouble:
                continue
            key = _as_it_is(model.path)
            seen = read[key] = self._read.get(key) or inspect(model, vocabulary=True)
            if seen.trouble:
                continue
            same = model.path.resolve() == self.own.path.resolve()
            name = self.own.name if same and model.name == self.own.word else model.name
            found[name] = self._known(name, model.path, seen.facts, model.size_bytes)
        self._read = read
        self._listed = (time.monotonic(), tuple(found.values()))

    def _known(
        self, name: str, path: Path, facts: "GGUFInfo | None", size_bytes: int = 0
    ) -> KnownModel:
        _, changed_ns, size = _as_it_is(path)
        created = changed_ns // 1_000_000_000
        if facts is None:
            return KnownModel(name, created, 0, size_bytes=size_bytes or size)
        return KnownModel(
            name,
            created,
            facts.context_tokens,
            facts.architecture,
            facts.quantization,
            facts.parameters,
            size_bytes or size,
            facts.abilities,
        )


def _as_it_is(path: Path) -> tuple[Path, int, int]:
    """What tells one state of a file from another; zeros for none."""
    try:
        found = path.stat()
    except OSError:
        return path, 0, 0
    return path, found.st_mtime_ns, found.st_size
