"""Where other programs keep their models, and what lies there. Nothing is opened but Ollama's manifests.

Ollama: `manifests/<host>/<namespace>/<model>/<tag>` names a blob by its digest. LM Studio:
`models/<publisher>/<repository>/*.gguf`. The Hugging Face cache: `models--<org>--<repository>/snapshots/
<revision>/*`, links into blobs. llama.cpp's own cache: files in one folder. Folders that the user named: every
GGUF file in them. All of it was written by others: bounded, and never followed out of where it should lie.
"""

import glob
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Final

import msgspec
from msgspec import Meta

OLLAMA: Final = "Ollama"
LM_STUDIO: Final = "LM Studio"
HUGGING_FACE: Final = "Hugging Face cache"
LLAMA_CPP: Final = "llama.cpp cache"
FOLDER: Final = "folder"

PREFIXES: Final[Mapping[str, str]] = {
    "ollama": OLLAMA,
    "lmstudio": LM_STUDIO,
    "hf": HUGGING_FACE,
    "llamacpp": LLAMA_CPP,
    "folder": FOLDER,
}
"""First part of an adopted model's name, and whose it is."""

MOST_FILES = 20_000
"""Looked at in one folder tree; a home folder given by mistake ends there."""
_DEEPEST = 6
_MANIFEST_BYTES = 1 << 20
_PART = re.compile(r"-(?P<number>\d{5})-of-(?P<count>\d{5})$")
_QUANTIZATION = re.compile(
    r"(?:^|[-._])(?P<name>(?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|NVFP4|B?F16|FP16|F32))$",
    re.IGNORECASE,
)
_NO_MODELS = re.compile(r"mmproj|imatrix", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Found:
    """A model that another program keeps. `short` and `long` are names for it, to be used where the short
    one is not the only one of its kind. `path`: the file, of a split model the first; None where there is
    none. `trouble`: why it cannot be used, as far as that shows without opening it. `ticket`: the file by
    which its owner knows it (Ollama's manifest). `notes`: what its owner does with it and localchat not."""

    origin: str
    short: str
    long: str
    path: Path | None
    trouble: str = ""
    ticket: Path | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """A folder where models of `origin` may lie."""

    origin: str
    folder: Path


def places(
    environ: Mapping[str, str], folders: Sequence[Path] = (), root: Path = Path("/")
) -> Iterator[Place]:
    """Where to look, whether or not it exists. `folders`: the user's own. `root`: where /usr stands."""
    home = _home(environ)
    ollama = _path(environ.get("OLLAMA_MODELS"), home) or home / ".ollama/models"
    yield Place(OLLAMA, ollama)
    yield Place(OLLAMA, root / "usr/share/ollama/.ollama/models")
    yield from (Place(LM_STUDIO, folder) for folder in _lm_studio_folders(home))
    yield Place(HUGGING_FACE, _hub_cache(environ, home))
    yield Place(LLAMA_CPP, _llama_cache(environ, home))
    yield from (Place(FOLDER, folder) for folder in folders)


def look(place: Place) -> Iterator[Found]:
    """The models at a place that exists. Raises OSError where it cannot be read."""
    with os.scandir(place.folder):
        pass  # a folder that may not be read is told apart from an empty one
    yield from _READERS[place.origin](place.folder)


def quantization(stem: str) -> str:
    """The quantization that a file's name ends with (`model-Q4_K_M` -> `Q4_K_M`); empty: none."""
    match = _QUANTIZATION.search(_PART.sub("", stem))
    return match["name"].upper() if match else ""


def parts(path: Path) -> tuple[Path, ...]:
    """All files of a model, by the name of its first: one, or the parts of a split one."""
    match = _PART.search(path.stem)
    if match is None or int(match["count"]) > 1024:
        return (path,)
    stem, count = path.stem[: match.start()], match["count"]
    return tuple(
        path.with_name(f"{stem}-{number:05}-of-{count}{path.suffix}")
        for number in range(1, int(count) + 1)
    )


def plain_stem(path: Path) -> str:
    """The name of a file without suffix and part number."""
    return _PART.sub("", path.stem)


def find_loose(word: str, models_dir: Path) -> Path | None:
    """The file of a model by its name in the models folder: `NAME.gguf`, or the first part of a split one;
    NAME may begin with folders. None where there is none."""
    name = PurePosixPath(word)
    if name.is_absolute() or ".." in name.parts or not name.name or "\0" in word:
        return None
    whole = models_dir / f"{word}.gguf"
    if whole.is_file():
        return whole
    folder, same = whole.parent, name.name
    firsts = folder.glob(f"{glob.escape(same)}-00001-of-[0-9][0-9][0-9][0-9][0-9].gguf")
    return next(iter(sorted(firsts)), None)


def loose_names(models_dir: Path) -> dict[str, Path]:
    """The files of the models folder by name, as `find_loose` takes it."""
    return {
        path.relative_to(models_dir).with_name(plain_stem(path)).as_posix(): path
        for path in gguf_files(models_dir)
    }


def gguf_files(folder: Path, deepest: int = _DEEPEST) -> Iterator[Path]:
    """GGUF files under a folder, in order: of split models the first part; no vision projectors, which are
    parts of models. Links to files count, links to folders are not followed."""
    seen = 0
    for top, folders, names in os.walk(folder):
        depth = len(Path(top).relative_to(folder).parts)
        folders[:] = sorted(name for name in folders if name[:1] != ".") if depth < deepest else []
        for name in sorted(names):
            seen += 1
            if seen > MOST_FILES:
                return
            path = Path(top, name)
            if _is_model(path):
                yield path


def _is_model(path: Path) -> bool:
    if path.suffix.lower() != ".gguf" or path.name[:1] == "." or _NO_MODELS.search(path.name):
        return False
    part = _PART.search(path.stem)
    return (part is None or int(part["number"]) == 1) and os.path.isfile(path)  # noqa: PTH113  never raises


# ---------------------------------------------------------------------------- where


def _home(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("HOME") or Path.home())


def _path(text: str | None, home: Path) -> Path | None:
    if not text:
        return None
    return home / text[2:] if text.startswith("~/") else Path(text).absolute()


def _cache(environ: Mapping[str, str], home: Path) -> Path:
    return _path(environ.get("XDG_CACHE_HOME"), home) or home / ".cache"


def _lm_studio_folders(home: Path) -> Iterator[Path]:
    """The folder that its settings name, and its two usual ones."""
    pointed = _first_line(home / ".lmstudio-home-pointer")
    homes = [*([Path(pointed)] if pointed else []), home / ".lmstudio", home / ".cache/lm-studio"]
    for folder in dict.fromkeys(homes):
        settings = _LmStudioSettings()
        try:
            raw = _small(folder / "settings.json")
            settings = msgspec.json.decode(raw, type=_LmStudioSettings)
        except (OSError, msgspec.DecodeError):
            pass  # it has none, or none that can be read: the usual place stands
        if settings.downloads_folder:
            yield Path(settings.downloads_folder)
        yield folder / "models"


class _LmStudioSettings(msgspec.Struct, rename="camel"):
    downloads_folder: str = ""


def _hub_cache(environ: Mapping[str, str], home: Path) -> Path:
    """As huggingface-hub finds it."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if path := _path(environ.get(name), home):
            return path
    top = _path(environ.get("HF_HOME"), home) or _cache(environ, home) / "huggingface"
    return top / "hub"


def _llama_cache(environ: Mapping[str, str], home: Path) -> Path:
    if path := _path(environ.get("LLAMA_CACHE"), home):
        return path
    mac = home / "Library/Caches" if sys.platform == "darwin" else None
    return (mac or _cache(environ, home)) / "llama.cpp"


def _first_line(path: Path) -> str:
    try:
        return _small(path).decode().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _small(path: Path) -> bytes:
    """A file that is small when it is what it should be. Raises OSError."""
    with path.open("rb") as file:
        data = file.read(_MANIFEST_BYTES + 1)
    return data if len(data) <= _MANIFEST_BYTES else b""


# ---------------------------------------------------------------------------- Ollama

_MODEL = "application/vnd.ollama.image.model"
_UNUSED: Final[Mapping[str, str]] = {
    "application/vnd.ollama.image.adapter": "Ollama adds an adapter to it, which is not used here.",
    "application/vnd.ollama.image.projector": "Its part that reads images is not used here.",
    "application/vnd.ollama.image.template": "Ollama's template is not used here; the model's own is.",
    "application/vnd.ollama.image.system": "Ollama's system prompt for it is not used here.",
    "application/vnd.ollama.image.params": "Ollama's parameters for it are not used here.",
}


class _Layer(msgspec.Struct, frozen=True, rename="camel"):
    media_type: str
    digest: Annotated[str, Meta(pattern=r"^sha256[:-][0-9a-f]{64}$")]


class _OllamaManifest(msgspec.Struct, frozen=True):
    layers: tuple[_Layer, ...] = ()


def _ollama(folder: Path) -> Iterator[Found]:
    top = folder / "manifests"
    for host in _inner(top):
        for space in _inner(host):
            for model in _inner(space):
                for tag in sorted(model.iterdir()):
                    if tag.is_file() and tag.name[:1] != ".":
                        yield _ollama_model(folder, tag)


def _inner(folder: Path) -> list[Path]:
    """Folders in a folder; none where it is not there."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name[:1] != ".")


def _ollama_model(folder: Path, ticket: Path) -> Found:
    host, space, model, tag = ticket.parts[-4:]
    short = "/".join(
        (
            "ollama",
            *(() if host == "registry.ollama.ai" else (host,)),
            *(() if (host, space) == ("registry.ollama.ai", "library") else (space,)),
            f"{model}:{tag}",
        )
    )
    bare = Found(OLLAMA, short, f"{short}@{folder}", None, ticket=ticket)
    try:
        layers = msgspec.json.decode(_small(ticket), type=_OllamaManifest).layers
    except (OSError, msgspec.DecodeError) as problem:
        return replace(bare, trouble=f"Ollama's manifest cannot be read: {problem}")
    files = [layer.digest[7:] for layer in layers if layer.media_type == _MODEL]
    if not files:
        return replace(bare, trouble=_without_file(layers))
    if len(files) > 1:
        return replace(bare, trouble="Ollama keeps it in several files, which only Ollama joins")
    # Older versions wrote a colon.
    blobs = [folder / "blobs" / f"sha256{sign}{files[0]}" for sign in "-:"]
    blob = next((path for path in blobs if path.is_file()), None)
    notes = tuple(
        text for kind, text in _UNUSED.items() if kind in {one.media_type for one in layers}
    )
    if blob is None:
        return replace(bare, trouble="Ollama's file of it is missing: the download did not finish")
    return replace(bare, path=blob, notes=notes)


def _without_file(layers: Sequence[_Layer]) -> str:
    if any(layer.media_type.startswith("application/vnd.ollama.image.tensor") for layer in layers):
        return "Ollama keeps it as single tensors, which only Ollama's own engine reads"
    return "its weights are not on this machine (Ollama runs it elsewhere)"


# ---------------------------------------------------------------------------- the others


def _lm_studio(folder: Path) -> Iterator[Found]:
    for path in gguf_files(folder):
        inner = path.relative_to(folder).parts[:-1]
        stem = plain_stem(path)
        yield Found(
            LM_STUDIO,
            "/".join(("lmstudio", *inner[1:], stem)),
            "/".join(("lmstudio", *inner, stem)),
            path,
        )


def _hugging_face(hub: Path) -> Iterator[Found]:
    for folder in _inner(hub):
        kind, *names = folder.name.split("--")
        if kind == "models" and names:
            yield from _repository(folder, "/".join(("hf", *names)))


def _repository(folder: Path, name: str) -> Iterator[Found]:
    """The GGUF files of a repository, each from the newest revision that has it."""
    seen: set[str] = set()
    for revision in _revisions(folder):
        for path in gguf_files(revision):
            inner = path.relative_to(revision)
            if inner.as_posix() in seen:
                continue
            seen.add(inner.as_posix())
            stem = inner.with_name(plain_stem(path)).as_posix()
            sort = quantization(path.stem)
            short = f"{name}:{sort}" if sort else f"{name}/{stem}"
            yield Found(HUGGING_FACE, short, f"{name}/{stem}", path)


def _revisions(folder: Path) -> list[Path]:
    """Snapshots, the one that `main` points to first, then the newest."""
    main = _first_line(folder / "refs/main")
    return sorted(
        _inner(folder / "snapshots"),
        key=lambda path: (path.name != main, -path.stat().st_mtime_ns, path.name),
    )


def _llama_cpp(folder: Path) -> Iterator[Found]:
    for path in gguf_files(folder, 0):
        name = f"llamacpp/{plain_stem(path)}"
        yield Found(LLAMA_CPP, name, name, path)


def _folder(folder: Path) -> Iterator[Found]:
    for path in gguf_files(folder):
        inner = path.relative_to(folder).with_name(plain_stem(path)).as_posix()
        yield Found(FOLDER, f"folder/{plain_stem(path)}", f"folder/{folder.name}/{inner}", path)


_READERS: Final[Mapping[str, Callable[[Path], Iterator[Found]]]] = {
    OLLAMA: _ollama,
    LM_STUDIO: _lm_studio,
    HUGGING_FACE: _hugging_face,
    LLAMA_CPP: _llama_cpp,
    FOLDER: _folder,
}
