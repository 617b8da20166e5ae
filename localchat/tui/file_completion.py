"""Completion of file names after `@` in a message."""

from collections.abc import Sequence
from operator import itemgetter

from textual.fuzzy import FuzzySearch

from localchat.config.paths import expand_home
from localchat.documents.folder import entries


def list_folder(typed: str) -> tuple[str, ...]:
    """List the folder of a partly typed path, such as `~/Doc`, `/etc/` or `../x`."""
    parent, _, name = typed.rpartition("/")
    folder = expand_home(f"{parent}/")
    files, folders = entries(folder, hidden=name.startswith("."))
    names = [f"{parent}/{path.name}" for path in files]
    return tuple(sorted((*names, *(f"{parent}/{path.name}/" for path in folders))))


def rank_names(letters: str, names: Sequence[str]) -> list[str]:
    """Return the names that contain the letters in order, best match first."""
    if not letters:
        return list(names)
    search = FuzzySearch(case_sensitive=False)
    scored = [(-search.match(letters, name)[0], name) for name in names]
    # A sort keeps the order of names that match equally well.
    return [name for score, name in sorted(scored, key=itemgetter(0)) if score < 0]
