"""Models that were used by their path: no index lists them, only the history knows them."""

from pathlib import Path
from typing import NamedTuple

from localchat.errors import LocalchatError
from localchat.history.store import History
from localchat.models.resolve import ResolvedModel

_CONVERSATIONS = 200
"""Conversations to look at."""


class UsedModels(NamedTuple):
    """The model in use, and those that were named by their path."""

    in_use: tuple[str, ...]
    """Names of the model in use."""
    paths: tuple[Path, ...] = ()
    """Paths of models that still exist, the last used first."""


def used_models(model: ResolvedModel, history: History | None) -> UsedModels:
    """Read from the history which models were used. Blocks for some milliseconds."""
    in_use = (model.word, model.name)
    names = dict.fromkeys(in_use)
    try:
        if history is not None:
            names.update(dict.fromkeys(entry.model for entry in history.list(_CONVERSATIONS)))
    except LocalchatError:
        pass  # the list of conversations reports what is wrong
    paths = [Path(name) for name in names if name.startswith("/")]
    return UsedModels(in_use, tuple(path for path in paths if _exists(path)))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False  # the name is too long, or its folder is not accessible
