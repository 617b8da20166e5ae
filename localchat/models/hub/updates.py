"""Newer files of pulled models on the hub, as the last check found them.

Only `check` asks the hub. What it found is kept, so that a listing can tell it without a network, until the
newer files are pulled.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from localchat.errors import ModelMissing
from localchat.models.hub.client import HubClient, Listing
from localchat.models.hub.download import with_retries
from localchat.models.hub.events import EventSink
from localchat.models.hub.hashes import hash_file
from localchat.models.hub.manifest import Installed
from localchat.models.hub.partial_file import RemoteFile
from localchat.models.hub.retry import RetryPolicy
from localchat.state_file import StateFile

UPDATES_FILE: Final = "updates.json"
_LOCK_PATIENCE_S: Final = 2.0


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """A pulled model whose repository has other files now."""

    name: str
    repository: str
    pulled_sha256: tuple[str, ...]
    """Of the files that are here; with others this record means nothing."""
    files: tuple[str, ...]
    """Those that changed or are gone, by their paths in the repository."""
    checked_at: str
    """ISO 8601 in UTC."""


class _UpdatesFile(msgspec.Struct, frozen=True, kw_only=True):
    updates: tuple[Update, ...] = ()


class CheckResult(NamedTuple):
    """What the hub has of one model."""

    model: Installed
    update: Update | None
    """None: the files here are those of the hub."""
    problem: str = ""
    """Why it could not be asked, a sentence."""


def check(
    models: Iterable[Installed], hub: HubClient, emit: EventSink, retry: RetryPolicy
) -> tuple[CheckResult, ...]:
    """Compare pulled models with the hub: one listing for each repository.

    Raises LocalchatError where the hub cannot be reached; a repository that is gone is a result.
    """
    listings: dict[str, Listing | str] = {}
    results: list[CheckResult] = []
    for model in models:
        repository = model.manifest.repository
        if repository not in listings:
            listings[repository] = _listing(repository, hub, emit, retry)
        listing = listings[repository]
        if isinstance(listing, str):
            results.append(CheckResult(model, None, listing))
        else:
            results.append(CheckResult(model, _update(model, listing)))
    return tuple(results)


def _listing(repository: str, hub: HubClient, emit: EventSink, retry: RetryPolicy) -> Listing | str:
    try:
        return with_retries(lambda: hub.list(repository), retry, emit, hub.endpoint)
    except ModelMissing as missing:
        return missing.message


def _update(model: Installed, listing: Listing) -> Update | None:
    there = {file.path: file for file in listing.files}
    changed = tuple(
        part.path
        for part, path in zip(model.manifest.files, model.files, strict=True)
        if not _same(there.get(part.path), path, part.sha256, part.size)
    )
    if not changed:
        return None
    return Update(
        name=model.manifest.name,
        repository=model.manifest.repository,
        pulled_sha256=_hashes(model),
        files=changed,
        checked_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _hashes(model: Installed) -> tuple[str, ...]:
    return tuple(part.sha256 for part in model.manifest.files)


def _same(file: RemoteFile | None, path: Path, sha256: str, size_bytes: int) -> bool:
    if file is None or file.size != size_bytes:
        return False
    if file.sha256 is not None:
        return file.sha256 == sha256
    if file.git_sha1 is None or not path.is_file():
        return True  # nothing but the length can be compared
    return hash_file(path, git=True).git_sha1 == file.git_sha1


class KnownUpdates:
    """What the last checks found. A file that cannot be read counts as empty."""

    def __init__(self, state_dir: Path) -> None:
        self._file = StateFile(state_dir / UPDATES_FILE, _UpdatesFile, _UpdatesFile())

    def record(self, results: Iterable[CheckResult]) -> None:
        """Keep the outcome of a check in place of earlier ones of the same models. Raises OSError."""
        done = [result for result in results if not result.problem]
        names = {result.model.manifest.name for result in done}
        new = tuple(result.update for result in done if result.update is not None)

        def merged(file: _UpdatesFile) -> _UpdatesFile:
            kept = tuple(update for update in file.updates if update.name not in names)
            return _UpdatesFile(updates=(*kept, *new))

        self._file.update(merged, _LOCK_PATIENCE_S)

    def of(self, models: Iterable[Installed]) -> tuple[Update, ...]:
        """Updates of these models that have not been pulled since."""
        here = {(entry.manifest.name, _hashes(entry)) for entry in models}
        updates = self._file.read().updates
        return tuple(entry for entry in updates if (entry.name, entry.pulled_sha256) in here)


def chosen(name: str | None, models: Iterable[Installed]) -> list[Installed]:
    """The pulled models to check: all, or the one of this name. Raises ModelMissing."""
    every = list(models)
    if name is None:
        return every
    same = name.casefold()
    matches = [model for model in every if model.manifest.name.casefold() == same]
    # A short form of a name means every quantization that is here.
    matches = matches or [
        model for model in every if model.manifest.name.casefold().startswith(f"{same}-")
    ]
    if not matches:
        raise ModelMissing(
            f"{name!r} is not a downloaded model, so there is nothing to check",
            hint="localchat list shows what is here",
        )
    return matches
