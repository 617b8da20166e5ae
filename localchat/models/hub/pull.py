"""`pull`: from a name to the files of a model in the models folder, and what is written down about them."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from localchat.errors import LocalchatError, ModelMissing, UsageError, reason
from localchat.models.hub import manifest as manifests
from localchat.models.hub.client import HubClient, Listing
from localchat.models.hub.download import Download, with_retries
from localchat.models.hub.events import EventSink, Note, ProgressMeter, PullFinished, PullStarted
from localchat.models.hub.manifest import Installed, Manifest, PulledFile
from localchat.models.hub.partial_file import RemoteFile, kept_bytes
from localchat.models.hub.retry import RetryPolicy
from localchat.models.hub.safe_paths import is_known_kind, repository_folder, target
from localchat.models.names import Reference
from localchat.models.quantizations import (
    Variant,
    choose,
    gguf_variants,
    safetensors_quantization,
    same_quantization,
)
from localchat.units import size

_SPARE_BYTES: Final = 64 << 20
"""Left free on the disk: a file system that is full to the last block slows everything else."""


class SelectedFiles(NamedTuple):
    """The files of a listing that make up a model."""

    name: str
    listing: Listing
    variant: Variant
    files: tuple[RemoteFile, ...]

    @property
    def total_bytes(self) -> int:
        """Of all files."""
        return sum(file.size for file in self.files)


def select_files(
    reference: Reference, hub: HubClient, emit: EventSink, retry: RetryPolicy
) -> SelectedFiles:
    """Which files the name means now. Raises LocalchatError."""
    listing = with_retries(lambda: hub.list(reference.repository), retry, emit)
    variant = _variant(reference, listing)
    by_path = {file.path: file for file in listing.files}
    files = tuple(by_path[path] for path in variant.files)
    return SelectedFiles(_name(reference, variant), listing, variant, files)


def bytes_present(choice: SelectedFiles, models_dir: Path) -> int:
    """Bytes of the choice that are here already, whole files and parts."""
    folder = repository_folder(models_dir, choice.listing.repository)
    return sum(
        target(models_dir, folder, file.path).stat().st_size
        if target(models_dir, folder, file.path).is_file()
        else kept_bytes(target(models_dir, folder, file.path), file)
        for file in choice.files
    )


def fetch(
    choice: SelectedFiles, hub: HubClient, models_dir: Path, emit: EventSink, retry: RetryPolicy
) -> Installed:
    """Bring every file of the choice that is not here yet, and write the manifest. Raises LocalchatError;
    what came stays, and the next call goes on there."""
    listing = choice.listing
    folder = repository_folder(models_dir, listing.repository)
    targets = {file: target(models_dir, folder, file.path) for file in choice.files}
    with _alone(models_dir, listing.repository, emit):
        known = {
            (part.path, part.size): part.sha256
            for one in manifests.read(folder)
            for part in one.files
        }
        sums = {file: _have(file, targets[file], known) for file in choice.files}
        here = sum(
            kept_bytes(place, file) if sums[file] is None else file.size
            for file, place in targets.items()
        )
        emit(_found(choice, here))
        _check_disk(models_dir, choice.total_bytes - here, choice)
        meter = ProgressMeter(choice.total_bytes, here, emit)
        download = Download(hub, listing, meter, emit, retry)
        for file, place in targets.items():
            if sums[file] is None:
                sums[file] = download.fetch(file, place)
        done = Manifest(
            name=choice.name,
            repository=listing.repository,
            revision=listing.revision,
            quantization=choice.variant.quantization,
            format=choice.variant.format,
            files=tuple(
                PulledFile(path=file.path, size=file.size, sha256=found)
                for file, found in sums.items()
                if found is not None
            ),
            pulled_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        _write_down(folder, done)
    result = Installed(done, folder)
    emit(PullFinished(done.name, str(result.path), choice.total_bytes, meter.fetched_bytes))
    return result


def _name(reference: Reference, variant: Variant) -> str:
    """The quantization names the model; where a file was asked for by its own name, that does."""
    asked, found = reference.quantization, variant.quantization
    by_file = variant.format == "gguf" and asked and not same_quantization(asked, found)
    return reference.stored_name(PurePosixPath(variant.stem).name if by_file else found)


def _variant(reference: Reference, listing: Listing) -> Variant:
    paths = [file.path for file in listing.files]
    ggufs = [path for path in paths if path.lower().endswith(".gguf")]
    if reference.format == "gguf" or (reference.format is None and ggufs):
        variants = gguf_variants(ggufs)
        alone = [(one.quantization, one.trouble) for one in variants] == [("", "")]
        if reference.entry is not None and alone:
            # The catalogue knows what the name of the file does not tell.
            return variants[0]._replace(quantization=reference.quantization or "")
        return choose(variants, reference.quantization, listing.repository)
    if reference.format is None and reference.quantization is not None:
        raise UsageError(
            f"{listing.repository} holds no GGUF files, so it has no {reference.quantization}",
            hint=f"the whole repository: localchat pull hf.co/{listing.repository}",
        )
    return _safetensors(reference, listing, paths)


def _safetensors(reference: Reference, listing: Listing, paths: list[str]) -> Variant:
    """The weights of a repository of safetensors with their settings and tokenizer. Where the weights are
    there in two forms, those that transformers reads; subfolders hold other forms."""
    own = [path for path in paths if "/" not in path and is_known_kind(path)]
    weights = [path for path in own if path.endswith(".safetensors")]
    usual = [path for path in weights if path.startswith("model")]
    if not weights:
        raise ModelMissing(
            f"{listing.repository} holds neither GGUF nor safetensors files",
            hint="look for a repository of the same model whose name ends in -GGUF",
        )
    rest = [path for path in own if not path.endswith((".safetensors", ".gguf"))]
    chosen = (*sorted(rest), *sorted(usual or weights))
    quantization = reference.quantization or safetensors_quantization(listing.repository)
    return Variant(quantization, "safetensors", listing.repository, chosen)


# ---------------------------------------------------------------------------- what is here


def _have(file: RemoteFile, place: Path, known: dict[tuple[str, int], str]) -> str | None:
    """The sha256 of a file that is here whole. One that a manifest lists was checked when it came; one that
    lies there for another reason is read."""
    if not place.is_file() or place.stat().st_size != file.size:
        return None
    found = known.get((file.path, file.size)) or _sha256(place)
    if file.sha256 is None and file.git_sha1 is not None:
        return found if _git_sha1(place) == file.git_sha1 else None
    return found if file.sha256 in (None, found) else None


def _sha256(path: Path) -> str:
    import hashlib

    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _git_sha1(path: Path) -> str:
    """The name that git gives a blob of these bytes."""
    import hashlib

    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


# ---------------------------------------------------------------------------- folder and disk


@contextmanager
def _alone(models_dir: Path, repository: str, emit: EventSink) -> Iterator[None]:
    """One pull of a repository at a time: a second waits, and then finds the files here. The lock falls with
    the process that holds it."""
    from filelock import FileLock, Timeout

    lock = FileLock(models_dir / ".locks" / f"{repository.replace('/', '--').lower()}.lock")
    try:
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            emit(Note(f"another pull of {repository} runs; this one waits for it"))
            lock.acquire()
    except OSError as problem:
        raise LocalchatError(f"{models_dir} cannot be written: {reason(problem)}") from problem
    try:
        yield
    finally:
        lock.release()


def _found(choice: SelectedFiles, done_bytes: int) -> PullStarted:
    return PullStarted(
        name=choice.name,
        repository=choice.listing.repository,
        revision=choice.listing.revision,
        quantization=choice.variant.quantization,
        format=choice.variant.format,
        files=choice.variant.files,
        done_bytes=done_bytes,
        total_bytes=choice.total_bytes,
    )


def _check_disk(models_dir: Path, missing: int, choice: SelectedFiles) -> None:
    free = shutil.disk_usage(models_dir).free
    if missing and missing + _SPARE_BYTES > free:
        raise LocalchatError(
            f"{choice.name} needs {size(missing)} more on the disk, and {size(free)} are free in "
            f"{models_dir}",
            hint="make room, choose a smaller quantization, or move the folder: LOCALCHAT_MODELS",
        )


def _write_down(folder: Path, done: Manifest) -> None:
    try:
        manifests.record(folder, done)
    except OSError as problem:
        raise LocalchatError(f"{folder} cannot be written: {reason(problem)}") from problem
