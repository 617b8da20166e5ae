"""Catalogue of models: the names that people use, and their repositories on the hub.

`models.toml` ships with the program; a file of the same form next to the settings file adds entries or
replaces them. An entry is found by `family:size`, each of its sources by its quantizations.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from localchat.config.paths import Paths, file_state
from localchat.errors import LocalchatError, UsageError, reason
from localchat.models.hub.manifest import Format
from localchat.models.quantizations import DEFAULT_QUANTIZATION, same_quantization

MODELS_FILE = "models.toml"

_NAME = r"^[a-z0-9][a-z0-9._-]*:[a-z0-9][a-z0-9._-]*$"
_REPOSITORY = r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$"
_Line = Annotated[str, Meta(min_length=1, max_length=120, pattern=r"^[^\n]+$")]
Use = Literal[
    "chat",
    "code",
    "infill",
    "reasoning",
    "tools",
    "vision",
    "audio",
    "embeddings",
    "multilingual",
]


class CatalogSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A repository on the hub with the model, and the quantizations that it offers."""

    repository: Annotated[str, Meta(pattern=_REPOSITORY, max_length=200)]
    format: Format
    quantizations: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")], ...],
        Meta(min_length=1),
    ]

    def offers(self, quantization: str) -> str | None:
        """Return a quantization as this source spells it. None if the source lacks it."""
        return next(
            (name for name in self.quantizations if same_quantization(name, quantization)), None
        )

    @property
    def default(self) -> str:
        """Default quantization: Q4_K_M, else the first."""
        return self.offers(DEFAULT_QUANTIZATION) or self.quantizations[0]


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling that the makers of the model recommend. None if they state nothing."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1000)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None


class CatalogEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model of the catalogue."""

    name: Annotated[str, Meta(pattern=_NAME, max_length=80)]
    parameters: Annotated[int, Meta(ge=1_000_000, le=5_000_000_000_000)]
    active_parameters: Annotated[int, Meta(ge=1_000_000)] | None = None
    """Parameters that one token uses, in a mixture of experts."""
    context_tokens: Annotated[int, Meta(ge=128, le=100_000_000)]
    released: Annotated[int, Meta(ge=2023, le=2099)] | None = None
    """Year of the release. None if the catalogue does not state it."""
    license: _Line
    """SPDX name, or the makers' own."""
    about: _Line
    uses: Annotated[tuple[Use, ...], Meta(min_length=1)]
    sampling: SamplingDefaults = SamplingDefaults()
    sources: Annotated[tuple[CatalogSource, ...], Meta(min_length=1)]

    @property
    def family(self) -> str:
        """Part of the name before the colon."""
        return self.name.partition(":")[0]

    def source(self, quantization: str | None) -> tuple[CatalogSource, str] | None:
        """Return the source of a quantization and its spelling there. None selects the default of the first."""
        if quantization is None:
            return self.sources[0], self.sources[0].default
        for source in self.sources:
            if (written := source.offers(quantization)) is not None:
                return source, written
        return None


Catalog = Mapping[str, CatalogEntry]


def models_that_read(kind: str) -> list[str]:
    """Return the models of the shipped catalogue that read attachments, smallest first.

    kind: `image` or `audio`.
    """
    use = {"image": "vision"}.get(kind, kind)
    entries = read_models(shipped_file()).values()
    fitting = [entry for entry in entries if use in entry.uses]
    return [entry.name for entry in sorted(fitting, key=lambda entry: entry.parameters)]


def read_catalog(paths: Paths) -> dict[str, CatalogEntry]:
    """Return all entries by name; the user's replace shipped ones. Raises UsageError with the faulty place."""
    own = paths.settings_file.with_name(MODELS_FILE)
    return read_models(shipped_file()) | (read_models(own) if own.is_file() else {})


def shipped_file() -> Path:
    """Return the shipped catalogue: in the installed package, or next to the package in a checkout."""
    import localchat

    package = Path(localchat.__file__).parent
    inside = package / MODELS_FILE
    if inside.is_file():
        return inside
    return package.parent / MODELS_FILE


def read_models(path: Path) -> dict[str, CatalogEntry]:
    """Return the entries of one file, which is parsed again only after a change. Raises UsageError."""
    return dict(_parsed(path, file_state(path)))


@lru_cache(maxsize=4)
def _parsed(path: Path, state: tuple[int, int, int]) -> dict[str, CatalogEntry]:
    """Parse a file. Cached by its state, because parsing takes 10 ms and servers look up every model name."""
    from tomllib import TOMLDecodeError, loads

    try:
        table = loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        raise LocalchatError(f"the catalogue {path} cannot be read: {reason(problem)}") from problem
    except TOMLDecodeError as problem:
        raise UsageError(f"the catalogue {path} is not TOML: {problem}") from problem
    return {name: _entry(path, name, body) for name, body in _models(path, table).items()}


def _models(path: Path, table: dict[str, Any]) -> dict[str, Any]:
    models = table.pop("models", {})
    if table or not isinstance(models, dict):
        names = ", ".join(sorted(table)) or "models that are no tables"
        raise UsageError(f"{path}: {names}", hint='a model belongs under [models."family:size"]')
    return models


def _entry(path: Path, name: str, body: object) -> CatalogEntry:
    if isinstance(body, dict):
        body["name"] = name
        if "licence" in body:  # the spelling of catalogues written before 0.3
            body["license"] = body.pop("licence")
    try:
        return msgspec.convert(body, CatalogEntry)
    except msgspec.ValidationError as problem:
        raise UsageError(
            f'{path}: [models."{name}"]: {problem}',
            hint="a name is family:size in small letters, as qwen2.5:7b; the models.toml that ships with "
            "localchat shows the other fields",
        ) from problem
