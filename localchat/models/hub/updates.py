"""Stores which pulled models have newer files on the hub, as of the last check.

Only `check` asks the hub. Its results are stored until the newer files are pulled, so that a listing can show
them without a network.
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
_LOCK_TIMEOUT_S: Final = 2.0


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """A pulled model whose repository has changed."""

    name: str
    repository: str
    pulled_sha256: tuple[str, ...]
    """Hashes of the files here. The record is invalid for other files."""
    files: tuple[str, ...]
    """Paths in the repository of files that changed or disappeared."""
    checked_at: str
    """ISO 8601 in UTC."""


class _UpdatesFile(msgspec.Struct, frozen=True, kw_only=True):
    updates: tuple[Update, ...] = ()


class CheckResult(NamedTuple):
    """Result of checking one model."""

    model: Installed
    update: Update | None
    """Update on the hub. None if the hub has the same files."""
    problem: str = ""
    """Sentence on why the hub could not be asked."""


def check(
    models: Iterable[Installed], hub: HubClient, emit: EventSink, retry: RetryPolicy
) -> tuple[CheckResult, ...]:
    """Compare pulled models with the hub: one listing for each repository.

    Raises LocalchatError if the hub cannot be reached. A repository that is gone is a result.
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
    hub_files = {file.path: file for file in listing.files}
    changed = tuple(
        part.path
        for part, path in zip(model.manifest.files, model.files, strict=True)
        if not _is_same(hub_files.get(part.path), path, part.sha256, part.size)
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


def _is_same(file: RemoteFile | None, path: Path, sha256: str, size_bytes: int) -> bool:
    if file is None or file.size != size_bytes:
        return False
    if file.sha256 is not None:
        return file.sha256 == sha256
    if file.git_sha1 is None or not path.is_file():
        return True  # only the length can be compared
    return hash_file(path, git=True).git_sha1 == file.git_sha1


class KnownUpdates:
    """Results of the last checks. A file that cannot be read counts as empty."""

    def __init__(self, state_dir: Path) -> None:
        self._file = StateFile(state_dir / UPDATES_FILE, _UpdatesFile, _UpdatesFile())

    def record(self, results: Iterable[CheckResult]) -> None:
        """Store the results of a check in place of earlier ones of the same models. Raises OSError."""
        checked = [result for result in results if not result.problem]
        names = {result.model.manifest.name for result in checked}
        new = tuple(result.update for result in checked if result.update is not None)

        def merged(file: _UpdatesFile) -> _UpdatesFile:
            others = tuple(update for update in file.updates if update.name not in names)
            return _UpdatesFile(updates=(*others, *new))

        self._file.update(merged, _LOCK_TIMEOUT_S)

    def of(self, models: Iterable[Installed]) -> tuple[Update, ...]:
        """Return the updates of these models that have not been pulled since."""
        here = {(entry.manifest.name, _hashes(entry)) for entry in models}
        updates = self._file.read().updates
        return tuple(entry for entry in updates if (entry.name, entry.pulled_sha256) in here)


def chosen(name: str | None, models: Iterable[Installed]) -> list[Installed]:
    """Return the pulled models to check: all, or those with this name. Raises ModelMissing."""
    every = list(models)
    if name is None:
        return every
    same = name.casefold()
    matches = [model for model in every if model.manifest.name.casefold() == same]
    # A short form of a name selects every quantization that is here.
    matches = matches or [
        model for model in every if model.manifest.name.casefold().startswith(f"{same}-")
    ]
    if not matches:
        raise ModelMissing(
            f"{name!r} is not a downloaded model, so there is nothing to check",
            hint="localchat list shows what is here",
        )
    return matches
