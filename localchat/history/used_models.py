"""Names of the models that conversations used: only the history knows those that were named by a path."""

from localchat.errors import LocalchatError
from localchat.history.store import History

_CONVERSATIONS = 200
"""Conversations to look at."""


def used_models(history: History | None) -> tuple[str, ...]:
    """Return names of models, the last used first. Blocks for some milliseconds."""
    if history is None:
        return ()
    try:
        names = [entry.model for entry in history.list(_CONVERSATIONS)]
    except LocalchatError:
        return ()  # the list of conversations reports what is wrong
    return tuple(dict.fromkeys(names))
