"""The catalogue: names that people use, and the repositories behind them.

`models.toml` ships with the program; a file of the same form in the folder of the settings file adds to it,
and its entries win. An entry is found by `family:size`, each of its sources by its quantizations.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from localchat.config.paths import Paths
from localchat.errors import LocalchatError, UsageError, reason
from localchat.models.hub.manifest import Format
from localchat.models.quantizations import DEFAULT_QUANTIZATION, same_quantization

MODELS_FILE = "models.toml"

_NAME = r"^[a-z0-9][a-z0-9._-]*:[a-z0-9][a-z0-9._-]*$"
_REPOSITORY = r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$"
_Line = Annotated[str, Meta(min_length=1, max_length=120, pattern=r"^[^\n]+$")]
Use = Literal["chat", "code", "infill", "reasoning", "tools", "embeddings", "multilingual"]


class CatalogSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A repository on the hub that holds the model. `quantizations`: what it offers; the default one is
    Q4_K_M, or where that is missing the first."""

    repository: Annotated[str, Meta(pattern=_REPOSITORY, max_length=200)]
    format: Format
    quantizations: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")], ...],
        Meta(min_length=1),
    ]

    def offers(self, quantization: str) -> str | None:
        """The quantization as this source writes it; None where it has none of that name."""
        return next(
            (one for one in self.quantizations if same_quantization(one, quantization)), None
        )

    @property
    def default(self) -> str:
        """What is meant where no quantization is named."""
        return self.offers(DEFAULT_QUANTIZATION) or self.quantizations[0]


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling as the makers of the model advise; None where they say nothing."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1000)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    parameters: Annotated[int, Meta(ge=1_000_000, le=5_000_000_000_000)]
    active_parameters: Annotated[int, Meta(ge=1_000_000)] | None = None
    context_tokens: Annotated[int, Meta(ge=128, le=100_000_000)]
    licence: _Line
    about: _Line
    uses: Annotated[tuple[Use, ...], Meta(min_length=1)]
    sampling: SamplingDefaults = SamplingDefaults()
    sources: Annotated[tuple[CatalogSource, ...], Meta(min_length=1)]


class CatalogEntry(NamedTuple):
    """A model under its name. `parameters`: all of them; `active_parameters`: those that one token uses,
    for a mixture of experts; `licence`: the SPDX name, or the makers' own."""

    name: str
    parameters: int
    active_parameters: int | None
    context_tokens: int
    licence: str
    about: str
    uses: tuple[Use, ...]
    sampling: SamplingDefaults
    sources: tuple[CatalogSource, ...]

    @property
    def family(self) -> str:
        """The part before the colon."""
        return self.name.partition(":")[0]

    @property
    def size(self) -> str:
        """The part behind the colon."""
        return self.name.partition(":")[2]

    def source(self, quantization: str | None) -> tuple[CatalogSource, str] | None:
        """Where a quantization is (None: the default of the first source), and how it is written there."""
        if quantization is None:
            return self.sources[0], self.sources[0].default
        for source in self.sources:
            if (written := source.offers(quantization)) is not None:
                return source, written
        return None


Catalog = Mapping[str, CatalogEntry]


def read_catalog(paths: Paths) -> dict[str, CatalogEntry]:
    """Every entry by name, the user's over those that ship. Raises UsageError for a user's file that is
    not right, naming the place."""
    own = paths.settings_file.with_name(MODELS_FILE)
    return read_models(shipped_file()) | (read_models(own) if own.is_file() else {})


def shipped_file() -> Path:
    """The catalogue of the program: in the installed package, or beside a checkout's."""
    import localchat

    package = Path(localchat.__file__).parent
    inside = package / MODELS_FILE
    return inside if inside.is_file() else package.parent / MODELS_FILE


def read_models(path: Path) -> dict[str, CatalogEntry]:
    """The entries of one file. Raises UsageError."""
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
        found = ", ".join(sorted(table)) or "models that are no tables"
        raise UsageError(f"{path}: {found}", hint='a model stands under [models."family:size"]')
    return models


def _entry(path: Path, name: str, body: object) -> CatalogEntry:
    try:
        msgspec.convert(name, Annotated[str, Meta(pattern=_NAME, max_length=80)])
    except msgspec.ValidationError as problem:
        raise UsageError(
            f"{path}: {name!r} is no name of a model",
            hint="a name is family:size in small letters, as qwen2.5:7b",
        ) from problem
    try:
        checked = msgspec.convert(body, _Body)
    except msgspec.ValidationError as problem:
        raise UsageError(
            f'{path}: [models."{name}"]: {problem}',
            hint="the entries of the models.toml that ships with localchat show the form",
        ) from problem
    return CatalogEntry(name, **msgspec.structs.asdict(checked))
