"""Models of llama.cpp's own download cache: files in one folder."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from localchat.models.external.base import (
    LLAMA_CPP,
    ExternalModel,
    cache_folder,
    folder_setting,
    gguf_files,
    home_folder,
    plain_stem,
)


def folders(environ: Mapping[str, str]) -> Iterator[Path]:
    """The cache folder, by llama.cpp's own rule."""
    mac = home_folder(environ) / "Library/Caches" if sys.platform == "darwin" else None
    usual = (mac or cache_folder(environ)) / "llama.cpp"
    yield folder_setting(environ, "LLAMA_CACHE") or usual


def read_models(folder: Path) -> Iterator[ExternalModel]:
    """The models of the cache."""
    for path in gguf_files(folder, 0):
        name = f"llamacpp/{plain_stem(path)}"
        yield ExternalModel(LLAMA_CPP, name, name, path)
