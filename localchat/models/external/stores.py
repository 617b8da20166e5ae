"""Readers of the folders in which other programs store models: one row of `STORES` per program.

A reader yields every GGUF model of a folder. Reads are bounded, because other programs wrote the files.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from localchat.model_files.byte_source import read_small
from localchat.model_files.ollama_manifest import OllamaLayer, read_manifest
from localchat.models.gguf_files import gguf_files, plain_stem, relative_name
from localchat.models.quantizations import quantization_of

OLLAMA: Final = "Ollama"
LM_STUDIO: Final = "LM Studio"
HUGGING_FACE: Final = "Hugging Face cache"
LLAMA_CPP: Final = "llama.cpp cache"
FOLDER: Final = "folder"


@dataclass(frozen=True, slots=True)
class ExternalModel:
    """A model in a folder of another program or of the user."""

    origin: str
    """Name of the store, one of the values of `PREFIXES`."""
    name: str
    """Name to use. Readers set the short name, and discovery replaces it by `long` if it is not unique."""
    long: str
    """Longer name, which is also accepted."""
    path: Path | None
    """GGUF file, or the first part of a split model. None if there is no usable file."""
    trouble: str = ""
    """Why the model cannot be used, if that is known without opening the file."""
    notes: tuple[str, ...] = ()
    """Sentences on parts that its owner adds to the model and localchat does not use."""


class Store(NamedTuple):
    """A program that stores models."""

    prefix: str
    """First part of its models' names."""
    name: str
    folders: Callable[[Mapping[str, str], Path], Iterator[Path]]
    """Yields the folders to read, from the environment and the root with /usr. They need not exist."""
    read: Callable[[Path], Iterator[ExternalModel]]


_OLLAMA_MODEL = "application/vnd.ollama.image.model"
_OLLAMA_TENSOR = "application/vnd.ollama.image.tensor"
_OLLAMA_UNUSED: Final[Mapping[str, str]] = {
    "application/vnd.ollama.image.adapter": "Ollama adds an adapter to it, which is not used here.",
    "application/vnd.ollama.image.template": "Ollama's template is not used here; the model's own is.",
    "application/vnd.ollama.image.system": "Ollama's system prompt for it is not used here.",
    "application/vnd.ollama.image.params": "Ollama's parameters for it are not used here.",
}


def _ollama_folders(environ: Mapping[str, str], root: Path) -> Iterator[Path]:
    """Yield the user's folder and that of the system service."""
    yield folder_setting(environ, "OLLAMA_MODELS") or home_folder(environ) / ".ollama/models"
    yield root / "usr/share/ollama/.ollama/models"


def _read_ollama(folder: Path) -> Iterator[ExternalModel]:
    """Yield every model with a manifest, even if its files cannot be used.

    `manifests/<host>/<namespace>/<model>/<tag>` names a blob by its digest.
    """
    for host in _subfolders(folder / "manifests"):
        for namespace in _subfolders(host):
            for model in _subfolders(namespace):
                for tag in sorted(model.iterdir()):
                    if tag.is_file() and tag.name[:1] != ".":
                        yield _ollama_model(folder, tag)


def _ollama_model(folder: Path, manifest: Path) -> ExternalModel:
    name = _ollama_name(manifest)
    model = ExternalModel(OLLAMA, name, f"{name}@{folder}", None)
    try:
        layers = read_manifest(manifest)
    except OSError as problem:
        reason = problem.strerror or str(problem)
        return replace(model, trouble=f"Ollama's manifest cannot be read: {reason}")
    except msgspec.DecodeError:
        return replace(model, trouble="Ollama's manifest is damaged")
    weights = [layer for layer in layers if layer.media_type == _OLLAMA_MODEL]
    if not weights:
        return replace(model, trouble=_trouble_without_file(layers))
    if len(weights) > 1:
        return replace(model, trouble="Ollama stores it in several files, which only Ollama joins")
    blob = weights[0].file(folder / "blobs")
    if blob is None:
        return replace(model, trouble="Ollama's file of it is missing: the download did not finish")
    media_types = {layer.media_type for layer in layers}
    notes = tuple(note for kind, note in _OLLAMA_UNUSED.items() if kind in media_types)
    return replace(model, path=blob, notes=notes)


def _ollama_name(manifest: Path) -> str:
    """Return the name that Ollama shows, which omits its own registry and library."""
    host, namespace, model, tag = manifest.parts[-4:]
    parts = [host, namespace]
    if host == "registry.ollama.ai":
        parts = [] if namespace == "library" else [namespace]
    return "/".join(("ollama", *parts, f"{model}:{tag}"))


def _trouble_without_file(layers: Sequence[OllamaLayer]) -> str:
    if any(layer.media_type.startswith(_OLLAMA_TENSOR) for layer in layers):
        return "Ollama stores it as single tensors, which only Ollama's own engine reads"
    return "its weights are not on this machine (Ollama runs it elsewhere)"


class _StudioSettings(msgspec.Struct, rename="camel"):
    downloads_folder: str = ""


def _studio_folders(environ: Mapping[str, str], root: Path) -> Iterator[Path]:
    """Yield the folder that LM Studio's settings name, and its two usual ones."""
    home = home_folder(environ)
    homes = [home / ".lmstudio", home / ".cache/lm-studio"]
    if pointer := _first_line(home / ".lmstudio-home-pointer"):
        homes.insert(0, Path(pointer))
    for folder in dict.fromkeys(homes):
        settings = _StudioSettings()
        try:
            raw = read_small(folder / "settings.json")
            settings = msgspec.json.decode(raw, type=_StudioSettings)
        except (OSError, msgspec.DecodeError):
            pass  # without readable settings the usual folder remains
        if settings.downloads_folder:
            yield Path(settings.downloads_folder)
        yield folder / "models"


def _read_studio(folder: Path) -> Iterator[ExternalModel]:
    """Yield `<publisher>/<repository>/*.gguf`. The short name omits the publisher."""
    for path in gguf_files(folder):
        parents = path.relative_to(folder).parts[:-1]
        stem = plain_stem(path)
        short = "/".join(("lmstudio", *parents[1:], stem))
        long = "/".join(("lmstudio", *parents, stem))
        yield ExternalModel(LM_STUDIO, short, long, path)


def _hub_folders(environ: Mapping[str, str], root: Path) -> Iterator[Path]:
    """Yield the cache folder by huggingface-hub's own rule."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if path := folder_setting(environ, variable):
            yield path
            return
    hub_home = folder_setting(environ, "HF_HOME") or _cache_folder(environ) / "huggingface"
    yield hub_home / "hub"


def _read_hub(folder: Path) -> Iterator[ExternalModel]:
    """Yield the GGUF models of `models--<org>--<repository>/snapshots/<revision>`."""
    for repository in _subfolders(folder):
        kind, *names = repository.name.split("--")
        if kind == "models" and names:
            yield from _read_repository(repository, "/".join(("hf", *names)))


def _read_repository(folder: Path, name: str) -> Iterator[ExternalModel]:
    """Yield the GGUF files of a repository, each from the newest revision that has it."""
    listed: set[str] = set()
    for revision in _revisions(folder):
        for path in gguf_files(revision):
            file = path.relative_to(revision).as_posix()
            if file in listed:
                continue
            listed.add(file)
            long = f"{name}/{relative_name(path, revision)}"
            quantization = quantization_of(path.name)
            short = f"{name}:{quantization}" if quantization else long
            yield ExternalModel(HUGGING_FACE, short, long, path)


def _revisions(folder: Path) -> list[Path]:
    """Return the snapshots: the one that `main` points to first, then the newest."""
    main = _first_line(folder / "refs/main")
    return sorted(
        _subfolders(folder / "snapshots"),
        key=lambda path: (path.name != main, -path.stat().st_mtime_ns, path.name),
    )


def _llama_cpp_folders(environ: Mapping[str, str], root: Path) -> Iterator[Path]:
    """Yield the cache folder by llama.cpp's own rule."""
    cache = _cache_folder(environ)
    if sys.platform == "darwin":
        cache = home_folder(environ) / "Library/Caches"
    yield folder_setting(environ, "LLAMA_CACHE") or cache / "llama.cpp"


def _read_llama_cpp(folder: Path) -> Iterator[ExternalModel]:
    for path in gguf_files(folder, 0):
        name = f"llamacpp/{plain_stem(path)}"
        yield ExternalModel(LLAMA_CPP, name, name, path)


def _read_folder(folder: Path) -> Iterator[ExternalModel]:
    """Yield the models of a folder that the user named."""
    for path in gguf_files(folder):
        long = f"folder/{folder.name}/{relative_name(path, folder)}"
        yield ExternalModel(FOLDER, f"folder/{plain_stem(path)}", long, path)


STORES: Final = (
    Store("ollama", OLLAMA, _ollama_folders, _read_ollama),
    Store("lmstudio", LM_STUDIO, _studio_folders, _read_studio),
    Store("hf", HUGGING_FACE, _hub_folders, _read_hub),
    Store("llamacpp", LLAMA_CPP, _llama_cpp_folders, _read_llama_cpp),
    # Discovery adds the folders of the user's aliases.
    Store("folder", FOLDER, lambda environ, root: iter(()), _read_folder),
)
PREFIXES: Final[Mapping[str, str]] = {store.prefix: store.name for store in STORES}
"""Names of the stores by the first part of their models' names."""


def _subfolders(folder: Path) -> list[Path]:
    """Return the visible folders in a folder, sorted. Empty if it does not exist."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name[:1] != ".")


def _first_line(path: Path) -> str:
    """Return the first line of a small text file. Empty if it cannot be read."""
    try:
        return read_small(path).decode().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError):
        return ""


def home_folder(environ: Mapping[str, str]) -> Path:
    """Return HOME, else the home folder of the user of this process."""
    return Path(environ.get("HOME") or Path.home())


def folder_setting(environ: Mapping[str, str], variable: str) -> Path | None:
    """Return the folder that an environment variable names, with `~/` for the home folder."""
    text = environ.get(variable)
    if not text:
        return None
    if text.startswith("~/"):
        return home_folder(environ) / text[2:]
    return Path(text).absolute()


def _cache_folder(environ: Mapping[str, str]) -> Path:
    return folder_setting(environ, "XDG_CACHE_HOME") or home_folder(environ) / ".cache"
