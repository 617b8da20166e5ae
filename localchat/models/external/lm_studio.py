"""Models of LM Studio: `models/<publisher>/<repository>/*.gguf`."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from localchat.models.external.base import (
    LM_STUDIO,
    ExternalModel,
    first_line,
    gguf_files,
    home_folder,
    plain_stem,
    read_small,
)


class _Settings(msgspec.Struct, rename="camel"):
    downloads_folder: str = ""


def folders(environ: Mapping[str, str]) -> Iterator[Path]:
    """The folder that LM Studio's settings name, and its two usual ones."""
    home = home_folder(environ)
    pointed = first_line(home / ".lmstudio-home-pointer")
    homes = [*([Path(pointed)] if pointed else []), home / ".lmstudio", home / ".cache/lm-studio"]
    for folder in dict.fromkeys(homes):
        settings = _Settings()
        try:
            raw = read_small(folder / "settings.json")
            settings = msgspec.json.decode(raw, type=_Settings)
        except (OSError, msgspec.DecodeError):
            pass  # without readable settings the usual place stands
        if settings.downloads_folder:
            yield Path(settings.downloads_folder)
        yield folder / "models"


def read_models(folder: Path) -> Iterator[ExternalModel]:
    """The models of one folder. The short name leaves the publisher out."""
    for path in gguf_files(folder):
        inner = path.relative_to(folder).parts[:-1]
        stem = plain_stem(path)
        short = "/".join(("lmstudio", *inner[1:], stem))
        long = "/".join(("lmstudio", *inner, stem))
        yield ExternalModel(LM_STUDIO, short, long, path)
