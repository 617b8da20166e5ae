"""Reads the chat templates in the folder of a checkpoint."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from localchat.errors import ModelInvalid, reason
from localchat.model_files.checkpoint import optional_object

DEFAULT: Final = "default"
"""Name of the template for ordinary conversations."""
_FILE: Final = "chat_template.jinja"
_MORE_FILES: Final = "additional_chat_templates"
_SETTINGS: Final = ("tokenizer_config.json", "chat_template.json")
_MAX_TEXT_BYTES: Final = 64 << 20
"""Limit on a tokenizer file. The largest vocabularies take a third of it."""


def chat_templates(folder: Path) -> dict[str, str]:
    """Return the chat templates by name, `default` first. Raises ModelInvalid."""
    templates = dict(_templates(folder))
    names = sorted(templates, key=lambda name: (name != DEFAULT, name))
    return {name: templates[name] for name in names}


def _templates(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield templates by name. A later one replaces an earlier one: template files override settings."""
    for name in reversed(_SETTINGS):
        stated = optional_object(folder / name).get("chat_template")
        if isinstance(stated, str) and stated.strip():
            yield DEFAULT, stated
        if isinstance(stated, list):
            yield from _listed_templates(stated)
    for path in sorted((folder / _MORE_FILES).glob("*.jinja")):
        yield path.stem, read_text(path)
    if (folder / _FILE).is_file():
        yield DEFAULT, read_text(folder / _FILE)


def _listed_templates(entries: list[object]) -> Iterator[tuple[str, str]]:
    """Yield the named templates of a list in the settings."""
    for entry in entries:
        if isinstance(entry, dict) and isinstance(entry.get("template"), str):
            yield str(entry.get("name")), entry["template"]


def read_text(path: Path, errors: str = "strict") -> str:
    """Read a text file of a checkpoint, up to a limit. Raises ModelInvalid. errors: as for bytes.decode."""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_TEXT_BYTES).decode("utf-8", errors)
    except (OSError, ValueError) as problem:
        raise ModelInvalid(
            f"{path} cannot be read: {reason(problem)}.",
            hint="The file may be incomplete or damaged: download it again.",
            path=str(path),
        ) from problem
