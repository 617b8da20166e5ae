"""Model resolver: finds the model that a request names, with its load options."""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from localchat.config.paths import Paths, file_state
from localchat.config.settings import Settings
from localchat.engine.options import EngineOptions
from localchat.errors import ModelMissing
from localchat.models.resolve import (
    GUIDE,
    ResolvedModel,
    locate_named,
    planned_load,
)

if TYPE_CHECKING:
    from localchat.engine.attached.protocol import AttachSpec
    from localchat.models.info.gguf_info import ModelDescription
    from localchat.models.info.inspect import Inspection
    from localchat.pool.entry import ModelSpec

_FRESH_S = 10.0
_CHOICE = "named in the request"
"""Source of the choice, as error messages show it."""

SettingsFor = Callable[[Iterable[str]], Settings]
"""Returns the settings for a model with these names."""


def engine_options(
    model: ResolvedModel,
    settings: Settings,
    paths: Paths,
    *,
    max_slots: int,
    more_slots: bool = False,
    room_for_slots: bool = False,
) -> EngineOptions:
    """Return the load options of a model. max_slots, more_slots and room_for_slots: see LoadOptions.

    Raises ModelMissing, ModelInvalid, UsageError for the draft model.
    """
    load = planned_load(settings, paths, max_slots=max_slots)
    kv_bytes = int(settings.cache_disk_gb * 1e9) if settings.history else 0
    return EngineOptions(
        model=model.path,
        load=msgspec.structs.replace(load, more_slots=more_slots, room_for_slots=room_for_slots),
        kv_folder=paths.kv_dir if kv_bytes else None,
        kv_folder_bytes=kv_bytes,
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
    from localchat.models.recommended_sampling import recommended_sampling  # reads the catalogue

    return recommended_sampling(model, paths).sampling


class ModelCard(msgspec.Struct, frozen=True):
    """An installed model, as the server lists it."""

    name: str
    created: int = 0
    """Time of the file's last change, in seconds of the Unix clock."""
    context_train: int = 0
    """Trained context in tokens, 0 if unknown."""
    architecture: str = ""
    quantization: str = ""
    parameters: int = 0
    """Number of parameters, 0 if unknown."""
    size_bytes: int = 0
    """Size of the file, 0 if unknown."""
    abilities: frozenset[str] = frozenset()
    """A subset of chat, tools, thinking, infill, embedding."""
    context_tokens: int = 0
    """Context at the last load, 0 before the first one."""
    media: tuple[str, ...] = ()
    """Kinds of attachments that the model reads, `image` and `audio`, as of the last load."""


class ModelResolver:
    """Resolves model names to installed models, never to paths, because clients must not choose files."""

    def __init__(
        self,
        own: ResolvedModel,
        settings_for: SettingsFor,
        paths: Paths,
        environ: Mapping[str, str],
        *,
        max_slots: int = 16,
        more_slots: bool = False,
    ) -> None:
        """own: the server's own model, which may be any file. An empty name means it too."""
        self.own = own
        self._settings_for = settings_for
        self._paths = paths
        self._environ = environ
        self._max_slots = max_slots
        self._more_slots = more_slots
        self._models: tuple[float, tuple[ModelCard, ...]] = (0.0, ())
        self._inspected: dict[tuple[Path, int, int, int], Inspection] = {}
        """Inspected headers by path, date and size of the file."""

    def resolve(self, name: str) -> "ModelSpec":
        """Resolve a name. Reads the disk. Raises ModelMissing, ModelInvalid, UsageError."""
        from localchat.pool.entry import ModelSpec

        if name in ("", *self.own.names):
            model = self.own
        else:
            model = locate_named(name, self._paths, _CHOICE, self._environ)
        return ModelSpec(model.name, self._options(model, name))

    def resolve_request(self, spec: "AttachSpec") -> "ModelSpec":
        """Resolve the request of another program of the owner.

        The request's options override the settings of the server. Raises ModelMissing, ModelInvalid,
        UsageError.
        """
        from localchat.pool.entry import ModelSpec

        path = Path(os.fsdecode(spec.model))
        if not path.exists():
            from localchat.engine.local import protocol

            raise ModelMissing(f"there is no file {protocol.sendable(str(path))}")
        model = self.own
        if path.resolve() != self.own.path.resolve():
            model = ResolvedModel(spec.typed_name or spec.name, spec.name, path, "")
        options = self._options(model, spec.typed_name)
        options = msgspec.structs.replace(
            options, load=spec.load.over(options.load), backend=spec.backend or options.backend
        )
        return ModelSpec(model.name, options)

    def _options(self, model: ResolvedModel, name: str) -> EngineOptions:
        settings = self._settings_for(dict.fromkeys((*model.names, name)))
        return engine_options(
            model,
            settings,
            self._paths,
            max_slots=self._max_slots,
            more_slots=self._more_slots,
            room_for_slots=True,
        )

    @property
    def stale(self) -> bool:
        """True if the list of `models` needs a refresh."""
        return time.monotonic() - self._models[0] > _FRESH_S or not self._models[1]

    def models(self) -> tuple[ModelCard, ...]:
        """Return every model as of the last refresh, the server's own first."""
        return self._models[1] or (self._card(self.own.name, self.own.path, None),)

    def refresh(self) -> None:
        """Read the installed models again.

        Each new file takes about 0.2 s, for its header and vocabulary. Raises LocalchatError, OSError.
        """
        from localchat.models.index import Model, read_index
        from localchat.models.info.inspect import inspect

        models = read_index(self._paths, self._environ).models
        own = Model(self.own.name, "file", "", None if self.own.remote else self.own.path)
        inspected = {}
        cards = {own.name: self._card(own.name, self.own.path, None)}
        for model in (own, *models):
            if model.path is None or model.trouble:
                continue
            key = (model.path, *file_state(model.path))
            inspection = self._inspected.get(key) or inspect(model, vocabulary=True)
            inspected[key] = inspection
            if inspection.trouble:
                continue
            name = model.name
            if name == self.own.word and model.path.resolve() == self.own.path.resolve():
                name = self.own.name
            cards[name] = self._card(name, model.path, inspection.facts, model.size_bytes)
        # Forget the files that are gone.
        self._inspected = inspected
        self._models = (time.monotonic(), tuple(cards.values()))

    def _card(
        self, name: str, path: Path, facts: "ModelDescription | None", size_bytes: int = 0
    ) -> ModelCard:
        _, changed_ns, size = file_state(path)
        created = changed_ns // 1_000_000_000
        if facts is None:
            return ModelCard(name, created, size_bytes=size_bytes or size)
        return ModelCard(
            name,
            created,
            facts.context_tokens,
            facts.architecture,
            facts.quantization,
            facts.parameters,
            size_bytes or size,
            facts.abilities,
        )
