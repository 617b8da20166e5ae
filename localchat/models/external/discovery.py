"""Models that other programs downloaded, used where they lie: nothing is copied, moved or changed.

Each has a name whose first part says whose it is: `ollama/qwen2.5:7b`, `lmstudio/REPOSITORY/FILE`,
`hf/ORG/REPOSITORY:QUANT`, `llamacpp/FILE`, `folder/FILE`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from localchat.config.paths import find_paths
from localchat.errors import ModelInvalid, ModelMissing, UsageError
from localchat.models.aliases import read_bookmarks
from localchat.models.external.ollama import (
    FOLDER,
    HUGGING_FACE,
    OLLAMA,
    PREFIXES,
    Found,
    Place,
    look,
    places,
)

_SAME = {"hf.co": "hf", "huggingface.co": "hf"}
"""Other first parts of a name that mean the Hugging Face cache."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """A model of another program. See `Found`; `name` is the one to use, `long` finds it too."""

    name: str
    long: str
    origin: str
    path: Path | None
    trouble: str = ""
    ticket: Path | None = None
    notes: tuple[str, ...] = ()


class Adoption(NamedTuple):
    """What was found, by place and name. `notices`: places that could not be read, in sentences."""

    models: tuple[Adopted, ...]
    notices: tuple[str, ...]


def adopt(
    environ: Mapping[str, str], *, root: Path = Path("/"), origins: Iterable[str] | None = None
) -> Adoption:
    """Look everywhere, or only where these `origins` keep their models. `root`: where /usr stands. Raises
    LocalchatError for bookmarks that cannot be read."""
    wanted = set(PREFIXES.values() if origins is None else origins)
    found: list[Found] = []
    notices: list[str] = []
    looked: set[Path] = set()
    for place in places(environ, _user_folders(environ), root):
        if place.origin not in wanted:
            continue
        try:
            real = place.folder.resolve()
            if real not in looked:
                found += look(place)
            looked.add(real)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as problem:
            notices.append(_unreadable(place, problem))
    return Adoption(tuple(_named(_once(found))), tuple(notices))


def find_adopted(word: str, environ: Mapping[str, str], *, root: Path = Path("/")) -> Path | None:
    """The file that an adopted model's name means; None where the word is no such name. Only the place that
    the word begins with is looked at. Raises UsageError where it means several, ModelInvalid where its owner
    has no file that could be used."""
    model = find(word, environ, root=root)
    if model is None:
        return None
    if model.path is None:
        raise ModelInvalid(
            f"{model.name} cannot be used: {model.trouble}",
            hint="localchat list shows what can be",
        )
    return model.path


def find(word: str, environ: Mapping[str, str], *, root: Path = Path("/")) -> Adopted | None:
    """The adopted model that a word means. Letter case does not matter, nor does a tag or a file that is the
    only one (`ollama/qwen2.5` is its `latest`). Raises UsageError where it means several."""
    first, slash, rest = word.partition("/")
    first = _SAME.get(first.lower(), first.lower())
    if not rest or first not in PREFIXES:
        return None
    models = adopt(environ, root=root, origins=(PREFIXES[first],)).models
    return pick(f"{first}{slash}{rest}", models)


def pick(word: str, models: Sequence[Adopted]) -> Adopted | None:
    """The one of these that a word means. Raises UsageError where several are meant alike."""
    wanted = word.casefold()
    for exact in (wanted, f"{wanted}:latest"):
        for model in models:
            if exact in (model.name.casefold(), model.long.casefold()):
                return model
    under = [
        model for model in models if model.name.casefold().startswith((f"{wanted}:", f"{wanted}/"))
    ]
    if len(under) > 1:
        names = ", ".join(model.name for model in under[:8])
        raise UsageError(
            f"{word} means {len(under)} models",
            hint=f"say which: {names}{' …' if under[8:] else ''}",
        )
    return under[0] if under else None


def missing(word: str, why: str) -> ModelMissing | None:
    """What is to be said of a word that begins as the name of an adopted model does, where there is no such
    model; None where it begins otherwise."""
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


def _user_folders(environ: Mapping[str, str]) -> tuple[Path, ...]:
    return tuple(Path(folder) for folder in read_bookmarks(find_paths(environ)).folders)


def _unreadable(place: Place, problem: OSError) -> str:
    whose = (
        f"your folder {place.folder}" if place.origin == "folder" else f"{place.origin}'s models"
    )
    sentence = f"{whose} cannot be read: {problem.strerror or problem} ({place.folder})"
    if place.origin == OLLAMA and isinstance(problem, PermissionError):
        sentence += "; a member of the group ollama may"
    return sentence


def _once(found: Iterable[Found]) -> Iterator[Found]:
    """Without files that an earlier place showed already. Two names of one program for a file are two."""
    shown: dict[Path, str] = {}
    for one in found:
        if one.path is not None:
            real = one.path.resolve()
            if shown.setdefault(real, one.origin) != one.origin:
                continue
        yield one


def _named(found: Iterable[Found]) -> Iterator[Adopted]:
    """With the short name where it is the only one, else the long one, numbered where even that is not."""
    kept = list(found)
    count: dict[str, int] = {}
    for one in kept:
        count[one.short.casefold()] = count.get(one.short.casefold(), 0) + 1
    taken: dict[str, int] = {}
    for one in kept:
        name = one.short if count[one.short.casefold()] == 1 else one.long
        again = taken[name.casefold()] = taken.get(name.casefold(), 0) + 1
        name = name if again == 1 else f"{name}~{again}"
        yield Adopted(name, one.long, one.origin, one.path, one.trouble, one.ticket, one.notes)
