"""Models that were used by their path: no index lists them, only the history knows them."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from localchat.errors import LocalchatError
from localchat.history.queries import ConversationSummary
from localchat.history.store import History
from localchat.models.resolve import ResolvedModel
from localchat.units import duration

_CONVERSATIONS = 200
"""Conversations to look at."""


class UsedModels(NamedTuple):
    """Times of the last use of models, by the names that users typed."""

    in_use: tuple[str, ...]
    """Names of the model in use."""
    last_used_s: dict[str, float]
    """Time of the last conversation with each model, newest first."""

    def words(self, name: str) -> str:
        """Return `in use` or `used 3 min ago`. Empty for a model that was never used."""
        if name in self.in_use:
            return "in use"
        if name not in self.last_used_s:
            return ""
        return f"used {duration(max(1.0, time.time() - self.last_used_s[name]))} ago"

    def paths(self) -> list[Path]:
        """Return the models that were named by their path and still exist."""
        names = dict.fromkeys((*self.in_use, *self.last_used_s))
        return [Path(name) for name in names if name.startswith("/") and _exists(Path(name))]


def used_models(model: ResolvedModel, history: History | None) -> UsedModels:
    """Read from the history which models were used. Blocks for some milliseconds."""
    last_used_s: dict[str, float] = {}
    summaries: Sequence[ConversationSummary] = ()
    try:
        if history is not None:
            summaries = history.list(_CONVERSATIONS)
    except LocalchatError:
        pass  # the list of conversations reports what is wrong
    for summary in summaries:
        last_used_s.setdefault(summary.model, summary.updated_s)
    return UsedModels((model.word, model.name), last_used_s)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False  # the name is too long, or its folder is not accessible
