"""Finds models that other programs downloaded and uses them where they lie: nothing is copied or changed.

Each has a name whose first part is its store: `ollama/qwen2.5:7b`, `lmstudio/REPOSITORY/FILE`,
`hf/ORG/REPOSITORY:QUANT`, `llamacpp/FILE`, `folder/FILE`.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from localchat.config.paths import find_paths
from localchat.errors import ModelInvalid, ModelMissing, UsageError
from localchat.models.aliases import read_aliases
from localchat.models.external import hf_cache, llamacpp, lm_studio, loose_files, ollama
from localchat.models.external.base import (
    FOLDER,
    HUGGING_FACE,
    LLAMA_CPP,
    LM_STUDIO,
    OLLAMA,
    PREFIXES,
    ExternalModel,
)

_SYNONYMS: Final = {"hf.co": "hf", "huggingface.co": "hf"}
"""Other first parts of a name that mean the Hugging Face cache."""

_READERS: Final[Mapping[str, Callable[[Path], Iterator[ExternalModel]]]] = {
    OLLAMA: ollama.read_models,
    LM_STUDIO: lm_studio.read_models,
    HUGGING_FACE: hf_cache.read_models,
    LLAMA_CPP: llamacpp.read_models,
    FOLDER: loose_files.read_models,
}


class ExternalModels(NamedTuple):
    """Everything that was found, by store and name."""

    models: tuple[ExternalModel, ...]
    notices: tuple[str, ...]
    """Sentences about folders that could not be read."""


def find_external_models(
    environ: Mapping[str, str], *, root: Path = Path("/"), origins: Iterable[str] | None = None
) -> ExternalModels:
    """Search all stores, or only those of `origins`. `root`: where /usr stands.

    Raises LocalchatError for a list of the user's folders that cannot be read.
    """
    searched = set(PREFIXES.values() if origins is None else origins)
    found: list[ExternalModel] = []
    notices: list[str] = []
    visited: set[Path] = set()
    for origin, folder in _folders(environ, root):
        if origin not in searched:
            continue
        try:
            real = folder.resolve()
            if real not in visited:
                with os.scandir(folder):
                    pass  # raises for a folder that may not be read, which a walk takes for an empty one
                found += _READERS[origin](folder)
            visited.add(real)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as problem:
            notices.append(_unreadable(origin, folder, problem))
    return ExternalModels(tuple(_with_unique_names(_without_repeats(found))), tuple(notices))


def find_external_file(
    word: str, environ: Mapping[str, str], *, root: Path = Path("/")
) -> Path | None:
    """The file that an external model's name means; None where the word is no such name.

    Searches only the store that the word begins with. Raises UsageError for an ambiguous word, ModelInvalid
    where the store has no usable file.
    """
    model = find_external_model(word, environ, root=root)
    if model is None:
        return None
    if model.path is None:
        raise ModelInvalid(
            f"{model.name} cannot be used: {model.trouble}",
            hint="localchat list shows what can be",
        )
    return model.path


def find_external_model(
    word: str, environ: Mapping[str, str], *, root: Path = Path("/")
) -> ExternalModel | None:
    """The external model that a word means, letter case apart; a tag or a file that is the only one may be
    left out (`ollama/qwen2.5` is its `latest`). Raises UsageError for an ambiguous word."""
    first, slash, rest = word.partition("/")
    first = _SYNONYMS.get(first.lower(), first.lower())
    if not rest or first not in PREFIXES:
        return None
    models = find_external_models(environ, root=root, origins=(PREFIXES[first],)).models
    return match_name(f"{first}{slash}{rest}", models)


def match_name(word: str, models: Sequence[ExternalModel]) -> ExternalModel | None:
    """The one of these models that a word means. Raises UsageError where it means several."""
    folded = word.casefold()
    for exact in (folded, f"{folded}:latest"):
        for model in models:
            if exact in (model.name.casefold(), model.long.casefold()):
                return model
    under = [
        model for model in models if model.name.casefold().startswith((f"{folded}:", f"{folded}/"))
    ]
    if len(under) > 1:
        names = ", ".join(model.name for model in under[:8])
        raise UsageError(
            f"{word} means {len(under)} models",
            hint=f"say which: {names}{' …' if under[8:] else ''}",
        )
    return under[0] if under else None


def find_by_suffix(
    word: str, environ: Mapping[str, str], *, root: Path = Path("/")
) -> ExternalModel | None:
    """Return the only usable model whose name ends with this word, as in `ollama/smollm2:135m`.

    A tag or a file name after the word may be missing. Raises UsageError if several models match."""
    folded = word.strip("/").casefold()
    if not folded:
        return None
    models = [
        model
        for model in find_external_models(environ, root=root).models
        if model.path is not None
        and any(_ends_with(name.casefold(), folded) for name in (model.name, model.long))
    ]
    if len(models) > 1:
        names = ", ".join(model.name for model in models[:8])
        raise UsageError(f"{word} matches {len(models)} models", hint=f"name one of them: {names}")
    return models[0] if models else None


def _ends_with(name: str, word: str) -> bool:
    """Return True if a name is the word after one of its slashes, perhaps with a tag or file behind it."""
    parts = name.split("/")
    tails = ("/".join(parts[start:]) for start in range(1, len(parts)))
    return any(tail == word or tail.startswith((f"{word}:", f"{word}/")) for tail in tails)


def missing_external(word: str, why: str) -> ModelMissing | None:
    """The error for a word with a store's prefix that means no model; None for other words.

    `why`: who chose the word, a phrase.
    """
    first, _, rest = word.partition("/")
    origin = PREFIXES.get(first.lower())
    if origin is None or not rest:
        return None
    fetch = {
        OLLAMA: f"; ollama pull {rest} fetches it there",
        HUGGING_FACE: f"; localchat pull hf.co/{rest} fetches it",
    }
    its = f"the {origin}" if origin.endswith("cache") else origin
    place = "imported folders" if origin == FOLDER else f"models of {its}"
    return ModelMissing(
        f"{word} is not among the {place} here ({why})",
        hint=f"localchat list shows what is here{fetch.get(origin, '')}",
    )


def _folders(environ: Mapping[str, str], root: Path) -> Iterator[tuple[str, Path]]:
    """Every store's folders, whether or not they exist, and the user's own."""
    yield from ((OLLAMA, folder) for folder in ollama.folders(environ, root))
    yield from ((LM_STUDIO, folder) for folder in lm_studio.folders(environ))
    yield from ((HUGGING_FACE, folder) for folder in hf_cache.folders(environ))
    yield from ((LLAMA_CPP, folder) for folder in llamacpp.folders(environ))
    yield from ((FOLDER, Path(folder)) for folder in read_aliases(find_paths(environ)).folders)


def _unreadable(origin: str, folder: Path, problem: OSError) -> str:
    whose = f"your folder {folder}" if origin == FOLDER else f"{origin}'s models"
    sentence = f"{whose} cannot be read: {problem.strerror or problem} ({folder})"
    if origin == OLLAMA and isinstance(problem, PermissionError):
        sentence += "; a member of the group ollama may"
    return sentence


def _without_repeats(found: Iterable[ExternalModel]) -> Iterator[ExternalModel]:
    """Leave out files that an earlier store listed. Two names of one store for a file are two models."""
    listed: dict[Path, str] = {}
    for one in found:
        if one.path is not None:
            real = one.path.resolve()
            if listed.setdefault(real, one.origin) != one.origin:
                continue
        yield one


def _with_unique_names(found: Iterable[ExternalModel]) -> Iterator[ExternalModel]:
    """Keep the short name where it is unique, else take the long one, numbered where that is not either."""
    kept = list(found)
    count: dict[str, int] = {}
    for one in kept:
        count[one.name.casefold()] = count.get(one.name.casefold(), 0) + 1
    taken: dict[str, int] = {}
    for one in kept:
        name = one.name if count[one.name.casefold()] == 1 else one.long
        again = taken[name.casefold()] = taken.get(name.casefold(), 0) + 1
        yield replace(one, name=name if again == 1 else f"{name}~{again}")
