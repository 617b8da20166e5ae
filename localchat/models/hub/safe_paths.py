"""Checks the paths of downloaded files: known kinds only, and never outside the models folder."""

import re
from pathlib import Path, PurePosixPath
from typing import Final

from localchat.errors import ModelInvalid

_SUFFIXES: Final = (".gguf", ".safetensors", ".safetensors.index.json")
_NAMES: Final = frozenset(
    {
        *("config.json", "generation_config.json", "quantize_config.json", "quant_config.json"),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
        *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model"),
        *("chat_template.json", "chat_template.jinja"),
    }
)
_MAX_NAME_BYTES: Final = 200
"""Limit on the bytes of one name. The usual limit is 255, and `.part.json` is appended."""
_MAX_DEPTH: Final = 6
_UNUSABLE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\\:*?\"<>|]|[ .]$|^ ")


def is_known_kind(path: str) -> bool:
    """Return True for weights, and for the settings and tokenizer that belong to them."""
    name = PurePosixPath(path).name
    return name.lower().endswith(_SUFFIXES) or name in _NAMES


def check_path(path: str) -> PurePosixPath:
    """Check the relative path of a file in a repository.

    Raises ModelInvalid for an unknown kind of file, or a path that leads elsewhere or that systems misread.
    """
    parts = path.split("/")
    for part in parts:
        if part in ("", ".", "..") or part.startswith((".", "~")) or _UNUSABLE.search(part):
            raise _refused(path, "it does not stay inside its folder, or no system can store it")
        if len(part.encode("utf-8", "surrogatepass")) > _MAX_NAME_BYTES:
            raise _refused(path, f"a name in it is longer than {_MAX_NAME_BYTES} bytes")
    if len(parts) > _MAX_DEPTH:
        raise _refused(path, f"it lies deeper than {_MAX_DEPTH} folders")
    if not is_known_kind(path):
        raise _refused(path, "only weights, settings and tokenizers are written")
    return PurePosixPath(path)


def repository_folder(models_dir: Path, repository: str) -> Path:
    """Return the folder of `owner/name`. Raises ModelInvalid if a link leaves the models folder."""
    owner, _, name = repository.partition("/")
    folder = models_dir / owner / name
    _stays_inside(models_dir, folder, repository)
    return folder


def target(models_dir: Path, folder: Path, path: str) -> Path:
    """Return the path for a file of a repository. Raises ModelInvalid."""
    file = folder / check_path(path)
    _stays_inside(models_dir, file.parent, path)
    return file


def _stays_inside(models_dir: Path, folder: Path, requested: str) -> None:
    """Raise ModelInvalid for a folder outside, after following its links as far as it exists."""
    if not folder.resolve().is_relative_to(models_dir.resolve()):
        raise _refused(requested, f"{folder} is a link out of the models folder {models_dir}")


def _refused(path: str, why: str) -> ModelInvalid:
    return ModelInvalid(
        f"the file {path[:200]!r} of the repository is refused: {why}",
        hint="use a repository that you trust; the same model is often in several",
    )
