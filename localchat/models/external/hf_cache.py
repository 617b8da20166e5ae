"""GGUF models of the Hugging Face cache.

`models--<org>--<repository>/snapshots/<revision>/*` are links to blobs.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from localchat.models.external.base import (
    HUGGING_FACE,
    ExternalModel,
    cache_folder,
    first_line,
    folder_setting,
    gguf_files,
    plain_stem,
    subfolders,
    without_part_number,
)

_QUANTIZATION = re.compile(
    r"(?:^|[-._])(?P<name>(?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|NVFP4|B?F16|FP16|F32))$",
    re.IGNORECASE,
)


def folders(environ: Mapping[str, str]) -> Iterator[Path]:
    """The cache folder, by huggingface-hub's own rule."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if path := folder_setting(environ, variable):
            yield path
            return
    top = folder_setting(environ, "HF_HOME") or cache_folder(environ) / "huggingface"
    yield top / "hub"


def read_models(hub: Path) -> Iterator[ExternalModel]:
    """The GGUF models of all repositories in the cache."""
    for folder in subfolders(hub):
        kind, *names = folder.name.split("--")
        if kind == "models" and names:
            yield from _repository(folder, "/".join(("hf", *names)))


def _repository(folder: Path, name: str) -> Iterator[ExternalModel]:
    """The GGUF files of a repository, each from the newest revision that has it."""
    seen: set[str] = set()
    for revision in _revisions(folder):
        for path in gguf_files(revision):
            inner = path.relative_to(revision)
            if inner.as_posix() in seen:
                continue
            seen.add(inner.as_posix())
            long = f"{name}/{inner.with_name(plain_stem(path)).as_posix()}"
            quantization = quantization_suffix(path.stem)
            short = f"{name}:{quantization}" if quantization else long
            yield ExternalModel(HUGGING_FACE, short, long, path)


def quantization_suffix(stem: str) -> str:
    """The quantization that a file's name ends with (`model-Q4_K_M` -> `Q4_K_M`); empty where there is none."""
    match = _QUANTIZATION.search(without_part_number(stem))
    return match["name"].upper() if match else ""


def _revisions(folder: Path) -> list[Path]:
    """Snapshots, the one that `main` points to first, then the newest."""
    main = first_line(folder / "refs/main")
    return sorted(
        subfolders(folder / "snapshots"),
        key=lambda path: (path.name != main, -path.stat().st_mtime_ns, path.name),
    )
