"""Reads the headers of a model on the hub by range requests.

The vocabulary comes before the list of tensors, so a GGUF takes a few megabytes.
"""

from dataclasses import replace
from pathlib import PurePosixPath
from typing import Final

import httpx2

from localchat.errors import ModelInvalid, NetworkError
from localchat.model_files.architecture import model_shape
from localchat.model_files.checkpoint import (
    CONFIG,
    SIDECARS,
    ModelSummary,
    read_checkpoint_sources,
    weight_files,
)
from localchat.model_files.open_gguf import check_model, join_parts, read_source
from localchat.models.hub.client import HubClient, RetryableError
from localchat.models.hub.download import CONTENT_RANGE
from localchat.models.hub.events import EventSink
from localchat.models.hub.partial_file import RemoteFile
from localchat.models.hub.pull import SelectedFiles
from localchat.models.hub.retry import with_retries
from localchat.units import size

MAX_BYTES: Final = 64 << 20
"""Limit on all headers of a model. The largest vocabularies take a tenth of it."""
MAX_IGNORED_BYTES: Final = 8 << 20
"""Limit on the bytes to skip from a server that ignores ranges."""
_MIN_READ_BYTES: Final = 256 << 10


class ByteBudget:
    """Bytes that reading the headers may still take."""

    def __init__(self, most_bytes: int) -> None:
        self._most = self._left = most_bytes

    def spend(self, count: int, name: str) -> None:
        """Take bytes from the budget. Raises ModelInvalid if it is exhausted."""
        self._left -= count
        if self._left < 0:
            raise ModelInvalid(
                f"{name}: its header is longer than {size(self._most)}.",
                hint="No model that runs here has such a header; take another repository.",
                path=name,
            )


class HubSource:
    """A file on the hub as a ByteSource. Caches the last range, so that small reads share a request."""

    def __init__(
        self,
        hub: HubClient,
        selected: SelectedFiles,
        file: RemoteFile,
        budget: ByteBudget,
        emit: EventSink,
    ) -> None:
        self.name = file.path
        self.size = file.size
        self._hub = hub
        self._listing = selected.listing
        self._file = file
        self._budget = budget
        self._emit = emit
        self._start = 0
        self._window = b""

    def read(self, offset: int, count: int) -> bytes:
        """See ByteSource. Raises NetworkError, and ModelInvalid beyond the budget."""
        end = min(offset + count, self.size)
        if offset >= end:
            return b""
        if not (self._start <= offset and end <= self._start + len(self._window)):
            count_read = min(max(end - offset, _MIN_READ_BYTES), self.size - offset)
            self._budget.spend(count_read, self.name)
            self._window = with_retries(
                lambda: self._fetch(offset, count_read), self._emit, self._hub.endpoint
            )
            self._start = offset
        return self._window[offset - self._start : end - self._start]

    def _fetch(self, offset: int, count: int) -> bytes:
        """Request a range. Raises RetryableError."""
        with self._hub.open(self._listing, self.name, offset, end=offset + count) as response:
            skipped = self._skipped(response, offset, count)
            body = bytearray()
            for piece in response.iter_raw():
                body += piece
                if len(body) >= skipped + count:
                    return bytes(body[skipped : skipped + count])
        raise RetryableError(f"{self.name}: the connection ended inside its header")

    def _skipped(self, response: httpx2.Response, offset: int, count: int) -> int:
        """Return the bytes of the response before the requested ones: 0 if the server supports ranges."""
        if response.status_code == 206:
            match = CONTENT_RANGE.fullmatch(response.headers.get("content-range", "").strip())
            if match is None or int(match[1]) != offset:
                raise NetworkError(f"{self.name}: the server sends another range than requested")
            return 0
        if response.status_code == 416:
            raise RetryableError(f"{self.name} is shorter on the server than in the listing")
        if offset + count > min(MAX_IGNORED_BYTES, self.size):
            raise NetworkError(
                f"{response.url.host} ignores ranges, so the header of {self.name} cannot be read alone",
                hint="a proxy may be in the way; the download itself does not need ranges",
            )
        return offset


def read_remote_header(selected: SelectedFiles, hub: HubClient, emit: EventSink) -> ModelSummary:
    """Return the shape of a GGUF model, or the headers of a safetensors repository.

    Reads every part of a split GGUF. Raises NetworkError, ModelInvalid.
    """
    budget = ByteBudget(MAX_BYTES)

    def source(file: RemoteFile) -> HubSource:
        return HubSource(hub, selected, file, budget, emit)

    by_path = {file.path: file for file in selected.files}
    if selected.variant.format == "gguf":
        headers = [read_source(source(by_path[path])) for path in selected.variant.files]
        header = headers[0]
        if len(headers) > 1:
            header = join_parts(headers, selected.name)
        check_model(header)
        encoders = [read_source(source(file)) for file in selected.encoder]
        return model_shape(replace(header, encoder=next(iter(encoders), None)))
    weights = weight_files([path for path in by_path if path.endswith(".safetensors")])
    config = next((path for path in by_path if PurePosixPath(path).name == CONFIG), None)
    if config is None:
        raise ModelInvalid(f"{selected.listing.repository} has no {CONFIG}.")
    return read_checkpoint_sources(
        selected.listing.repository,
        source(by_path[config]),
        [source(by_path[path]) for path in weights],
        {path: source(by_path[path]) for path in SIDECARS if path in by_path},
    )
