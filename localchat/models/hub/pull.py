"""Pulls a model: selects its files on the hub, downloads them to the models folder, writes the manifest."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from localchat.errors import LocalchatError, ModelMissing, UsageError, os_errors_as
from localchat.model_files.gguf import has_gguf_magic
from localchat.model_files.projector import projector_names
from localchat.models.hub import manifest as manifests
from localchat.models.hub.client import HubClient, Listing
from localchat.models.hub.download import Download
from localchat.models.hub.events import EventSink, Note, ProgressMeter, PullFinished, PullStarted
from localchat.models.hub.hashes import hash_file
from localchat.models.hub.manifest import Installed, Manifest, PulledFile
from localchat.models.hub.partial_file import RemoteFile, kept_bytes
from localchat.models.hub.retry import with_retries
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
"""Bytes to leave free: a completely full file system slows everything else."""


class SelectedFiles(NamedTuple):
    """The files of a listing that make up a model."""

    name: str
    listing: Listing
    variant: Variant
    files: tuple[RemoteFile, ...]

    @property
    def encoder(self) -> tuple[RemoteFile, ...]:
        """The file with which a GGUF model sees or hears. Empty: none."""
        return tuple(file for file in self.files if file.path not in self.variant.files)

    @property
    def total_bytes(self) -> int:
        """Size of all files."""
        return sum(file.size for file in self.files)


def select_files(reference: Reference, hub: HubClient, emit: EventSink) -> SelectedFiles:
    """List the repository and select the files that a name means now. Raises LocalchatError."""
    listing = with_retries(lambda: hub.list(reference.repository), emit, hub.endpoint)
    variant = _variant(reference, listing)
    by_path = {file.path: file for file in listing.files}
    files = tuple(by_path[path] for path in (*variant.files, *_encoder(variant, listing)))
    return SelectedFiles(_name(reference, variant), listing, variant, files)


def _encoder(variant: Variant, listing: Listing) -> list[str]:
    """Return the path of the projector that goes with a GGUF model: beside it, or at the top."""
    if variant.format != "gguf":
        return []
    model = PurePosixPath(variant.files[0])
    paths = [PurePosixPath(file.path) for file in listing.files]
    for folder in (model.parent, PurePosixPath(".")):
        names = [path.name for path in paths if path.parent == folder and path.suffix == ".gguf"]
        if projectors := projector_names(model.name, names):
            return [str(folder / projectors[0])]
    return []


def bytes_present(selected: SelectedFiles, models_dir: Path) -> int:
    """Return the bytes of the selected files that are here, in whole files and parts."""
    folder = repository_folder(models_dir, _spelled_here(selected.listing.repository, models_dir))
    present = 0
    for file in selected.files:
        path = target(models_dir, folder, file.path)
        present += path.stat().st_size if path.is_file() else kept_bytes(path, file)
    return present


def fetch(selected: SelectedFiles, hub: HubClient, models_dir: Path, emit: EventSink) -> Installed:
    """Download every selected file that is not here yet, and write the manifest.

    Raises LocalchatError. Bytes already here stay, and the next call resumes.
    """
    listing = selected.listing
    repository = _spelled_here(listing.repository, models_dir)
    folder = repository_folder(models_dir, repository)
    targets = {file: target(models_dir, folder, file.path) for file in selected.files}
    with _locked(models_dir, listing.repository, emit):
        stored_hashes = {
            (part.path, part.size): part.sha256
            for manifest in manifests.read(folder)
            for part in manifest.files
        }
        sums = {
            file: _verified_sha256(file, targets[file], stored_hashes) for file in selected.files
        }
        here = sum(
            kept_bytes(path, file) if sums[file] is None else file.size
            for file, path in targets.items()
        )
        emit(_started(selected, here))
        _check_disk(models_dir, selected.total_bytes - here, selected)
        meter = ProgressMeter(selected.total_bytes, here, emit)
        download = Download(hub, listing, meter, emit)
        for file, path in targets.items():
            if sums[file] is None:
                sums[file] = download.fetch(file, path)
        done = Manifest(
            name=_name_here(selected.name, folder),
            repository=repository,
            revision=listing.revision,
            quantization=selected.variant.quantization,
            format=selected.variant.format,
            files=tuple(
                PulledFile(path=file.path, size=file.size, sha256=file_hash)
                for file, file_hash in sums.items()
                if file_hash is not None
            ),
            pulled_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        with os_errors_as(LocalchatError, f"{folder} cannot be written"):
            manifests.record(folder, done)
    result = Installed(done, folder)
    emit(
        PullFinished(
            done.name,
            str(result.path),
            selected.total_bytes,
            meter.fetched_bytes,
            hashed=all(file.hash for file in selected.files),
            trouble=_no_gguf(result),
        )
    )
    return result


def _spelled_here(repository: str, models_dir: Path) -> str:
    """Return the repository in the spelling of its folder here, whatever its letter case."""
    for model in manifests.installed(models_dir):
        if model.manifest.repository.lower() == repository.lower():
            return model.manifest.repository
    return repository


def _name_here(name: str, folder: Path) -> str:
    """Return the name in the spelling of the folder's manifest, if it lists the name."""
    stored = (manifest.name for manifest in manifests.read(folder))
    return next((spelling for spelling in stored if spelling.lower() == name.lower()), name)


def _no_gguf(pulled: Installed) -> str:
    """Why a file cannot be a model although it came as the hub has it; empty: it may be one."""
    for path in pulled.files:
        if path.suffix.lower() == ".gguf" and not has_gguf_magic(path):
            return f"{path.name} is not a GGUF file"
    return ""


def _name(reference: Reference, variant: Variant) -> str:
    """Return the model's name: by its quantization, or by the file's name if the user typed that."""
    requested = reference.quantization
    own = variant.quantization
    by_file = variant.format == "gguf" and requested and not same_quantization(requested, own)
    return reference.stored_name(PurePosixPath(variant.stem).name if by_file else own)


def _variant(reference: Reference, listing: Listing) -> Variant:
    paths = [file.path for file in listing.files]
    ggufs = [path for path in paths if path.lower().endswith(".gguf")]
    if reference.format == "gguf" or (reference.format is None and ggufs):
        variants = gguf_variants(ggufs)
        alone = [(variant.quantization, variant.trouble) for variant in variants] == [("", "")]
        if reference.entry is not None and alone:
            # The catalogue knows the quantization that the file name lacks.
            return variants[0]._replace(quantization=reference.quantization or "")
        return choose(variants, reference.quantization, listing.repository)
    if reference.format is None and reference.quantization is not None:
        raise UsageError(
            f"{listing.repository} holds no GGUF files, so it has no {reference.quantization}",
            hint=f"the whole repository: localchat pull hf.co/{listing.repository}",
        )
    return _safetensors(reference, listing, paths)


def _safetensors(reference: Reference, listing: Listing, paths: list[str]) -> Variant:
    """Return the weights of a safetensors repository, with settings and tokenizer.

    Of weights in two forms, selects the one that transformers reads. Subfolders contain other forms.
    """
    own = [path for path in paths if "/" not in path and is_known_kind(path)]
    weights = [path for path in own if path.endswith(".safetensors")]
    usual = [path for path in weights if path.startswith("model")]
    if not weights:
        raise ModelMissing(
            f"{listing.repository} holds neither GGUF nor safetensors files",
            hint="look for a repository of the same model whose name ends in -GGUF",
        )
    others = [path for path in own if not path.endswith((".safetensors", ".gguf"))]
    chosen = (*sorted(others), *sorted(usual or weights))
    quantization = reference.quantization or safetensors_quantization(listing.repository)
    return Variant(quantization, "safetensors", listing.repository, chosen)


def _verified_sha256(
    file: RemoteFile, path: Path, stored_hashes: dict[tuple[str, int], str]
) -> str | None:
    """Return the sha256 of a file that is complete here, else None.

    A file in a manifest was verified when it arrived. Other files are read.
    """
    if not path.is_file() or path.stat().st_size != file.size:
        return None
    if file.sha256 is None and file.git_sha1 is not None:
        hashes = hash_file(path, git=True)
        if hashes.git_sha1 == file.git_sha1:
            return hashes.sha256
        return None
    actual = stored_hashes.get((file.path, file.size)) or hash_file(path).sha256
    if file.sha256 in (None, actual):
        return actual
    return None


@contextmanager
def _locked(models_dir: Path, repository: str, emit: EventSink) -> Iterator[None]:
    """Lock a repository for one pull. A second pull waits, and then finds the files here.

    The lock ends with the process that holds it.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(models_dir / ".locks" / f"{repository.replace('/', '--').lower()}.lock")
    with os_errors_as(LocalchatError, f"{models_dir} cannot be written"):
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            emit(Note(f"another pull of {repository} runs; this one waits for it"))
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _started(selected: SelectedFiles, done_bytes: int) -> PullStarted:
    return PullStarted(
        name=selected.name,
        repository=selected.listing.repository,
        revision=selected.listing.revision,
        quantization=selected.variant.quantization,
        format=selected.variant.format,
        files=tuple(file.path for file in selected.files),
        done_bytes=done_bytes,
        total_bytes=selected.total_bytes,
    )


def _check_disk(models_dir: Path, missing: int, selected: SelectedFiles) -> None:
    free = shutil.disk_usage(models_dir).free
    if missing and missing + _SPARE_BYTES > free:
        raise LocalchatError(
            f"{selected.name} needs {size(missing)} more on the disk, and {size(free)} are free in "
            f"{models_dir}, of which {size(_SPARE_BYTES)} stay free",
            hint="make room, choose a smaller quantization, or move the folder: LOCALCHAT_MODELS",
        )
