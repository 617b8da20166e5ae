"""Finds models that other programs downloaded and uses them in place: nothing is copied or changed.

The first part of a model's name is its store: `ollama/qwen2.5:7b`, `lmstudio/REPOSITORY/FILE`,
`hf/ORG/REPOSITORY:QUANT`, `llamacpp/FILE`, `folder/FILE`.
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from localchat.config.paths import find_paths
from localchat.errors import ModelInvalid, ModelMissing, UsageError
from localchat.models.aliases import read_aliases
from localchat.models.external.stores import (
    FOLDER,
    HUGGING_FACE,
    OLLAMA,
    PREFIXES,
    STORES,
    ExternalModel,
    Store,
)

_SYNONYMS: Final = {"hf.co": "hf", "huggingface.co": "hf"}
"""Other prefixes that mean the Hugging Face cache."""
_MAX_LISTED: Final = 8
"""Names that an error about several matches lists."""


class ExternalModels(NamedTuple):
    """Models of all stores, by store and name."""

    models: tuple[ExternalModel, ...]
    notices: tuple[str, ...]
    """Sentences about folders that could not be read."""


def find_external_models(
    environ: Mapping[str, str], *, root: Path = Path("/"), origins: Iterable[str] | None = None
) -> ExternalModels:
    """Search all stores, or only those of `origins`. root: the folder with /usr.

    Raises LocalchatError if the list of the user's folders cannot be read.
    """
    searched = set(PREFIXES.values() if origins is None else origins)
    models: list[ExternalModel] = []
    notices: list[str] = []
    visited: set[Path] = set()
    for store, folder in _folders(environ, root):
        if store.name not in searched:
            continue
        try:
            real = folder.resolve()
            if real not in visited:
                # Raises for a folder that may not be read, which a walk would take for an empty one.
                with os.scandir(folder):
                    pass
                models += store.read(folder)
            visited.add(real)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as problem:
            notices.append(_unreadable(store.name, folder, problem))
    return ExternalModels(tuple(_with_unique_names(_without_repeats(models))), tuple(notices))


def find_external_file(
    name: str, environ: Mapping[str, str], *, root: Path = Path("/")
) -> Path | None:
    """Return the file behind an external model's name. None if the name has another form.

    Searches only the store of the prefix. Raises UsageError if several models match, ModelInvalid if the
    store has no usable file.
    """
    model = find_external_model(name, environ, root=root)
    if model is None:
        return None
    if model.path is None:
        raise ModelInvalid(
            f"{model.name} cannot be used: {model.trouble}",
            hint="localchat list shows what can be",
        )
    return model.path


def find_external_model(
    name: str, environ: Mapping[str, str], *, root: Path = Path("/")
) -> ExternalModel | None:
    """Return the external model with this name, whatever its letter case.

    A tag or file may be omitted if it is the only one: `ollama/qwen2.5` is its `latest`. Raises UsageError if
    several models match.
    """
    first, slash, tail = name.partition("/")
    prefix = _SYNONYMS.get(first.lower(), first.lower())
    if not tail or prefix not in PREFIXES:
        return None
    models = find_external_models(environ, root=root, origins=(PREFIXES[prefix],)).models
    return match_name(f"{prefix}{slash}{tail}", models)


def match_name(name: str, models: Sequence[ExternalModel]) -> ExternalModel | None:
    """Return the model with this name. Raises UsageError if several match."""
    folded = name.casefold()
    for exact in (folded, f"{folded}:latest"):
        for model in models:
            if exact in (model.name.casefold(), model.long.casefold()):
                return model
    matches = [
        model for model in models if model.name.casefold().startswith((f"{folded}:", f"{folded}/"))
    ]
    return _only(matches, name)


def find_by_suffix(name: str, environ: Mapping[str, str]) -> ExternalModel | None:
    """Return the only usable model whose name ends with `name`, as in `ollama/smollm2:135m`.

    A tag or a file after the name may be missing. Raises UsageError if several models match.
    """
    folded = name.strip("/").casefold()
    if not folded:
        return None
    matches = [
        model
        for model in find_external_models(environ).models
        if model.path is not None
        and any(_ends_with(own_name.casefold(), folded) for own_name in (model.name, model.long))
    ]
    return _only(matches, name)


def _only(matches: Sequence[ExternalModel], name: str) -> ExternalModel | None:
    """Return the only match, or None without one. Raises UsageError for several."""
    if len(matches) > 1:
        names = ", ".join(model.name for model in matches[:_MAX_LISTED])
        more = ""
        if matches[_MAX_LISTED:]:
            more = " …"
        raise UsageError(
            f"{name} matches {len(matches)} models", hint=f"name one of them: {names}{more}"
        )
    if matches:
        return matches[0]
    return None


def _ends_with(name: str, suffix: str) -> bool:
    """Return True if a tail of the name after a slash is `suffix`, with or without a tag or file."""
    parts = name.split("/")
    tails = ("/".join(parts[start:]) for start in range(1, len(parts)))
    return any(tail == suffix or tail.startswith((f"{suffix}:", f"{suffix}/")) for tail in tails)


def missing_external(name: str, why: str) -> ModelMissing | None:
    """Return the error for a name with a store's prefix that matches no model. None for other names.

    why: a phrase on who chose the name.
    """
    first, _, tail = name.partition("/")
    origin = PREFIXES.get(first.lower())
    if origin is None or not tail:
        return None
    fetch = {
        OLLAMA: f"; ollama pull {tail} fetches it there",
        HUGGING_FACE: f"; localchat pull hf.co/{tail} fetches it",
    }
    owner = f"the {origin}" if origin.endswith("cache") else origin
    models = "imported folders" if origin == FOLDER else f"models of {owner}"
    return ModelMissing(
        f"{name} is not among the {models} here ({why})",
        hint=f"localchat list shows what is here{fetch.get(origin, '')}",
    )


def _folders(environ: Mapping[str, str], root: Path) -> Iterator[tuple[Store, Path]]:
    """Yield the folders of every store, and then the user's own. They need not exist."""
    for store in STORES:
        yield from ((store, folder) for folder in store.folders(environ, root))
    own = next(store for store in STORES if store.name == FOLDER)
    yield from ((own, Path(folder)) for folder in read_aliases(find_paths(environ)).folders)


def _unreadable(origin: str, folder: Path, problem: OSError) -> str:
    owner = f"your folder {folder}" if origin == FOLDER else f"{origin}'s models"
    sentence = f"{owner} cannot be read: {problem.strerror or problem} ({folder})"
    if origin == OLLAMA and isinstance(problem, PermissionError):
        sentence += "; a member of the group ollama may"
    return sentence


def _without_repeats(models: Iterable[ExternalModel]) -> Iterator[ExternalModel]:
    """Skip files that an earlier store listed. Two names of one store for a file are two models."""
    origins: dict[Path, str] = {}
    for model in models:
        if model.path is not None:
            real = model.path.resolve()
            if origins.setdefault(real, model.origin) != model.origin:
                continue
        yield model


def _with_unique_names(models: Iterable[ExternalModel]) -> Iterator[ExternalModel]:
    """Keep unique short names, replace others by long names, and number repeated long names."""
    models = list(models)
    short_names = Counter(model.name.casefold() for model in models)
    used: Counter[str] = Counter()
    for model in models:
        name = model.name if short_names[model.name.casefold()] == 1 else model.long
        used[name.casefold()] += 1
        number = used[name.casefold()]
        yield replace(model, name=name if number == 1 else f"{name}~{number}")
