"""Wire types of files and batches, as OpenAI's API has them."""

from typing import Any, Literal

import msgspec


class FileObject(msgspec.Struct, kw_only=True):
    """A file."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: str = "processed"
    """Deprecated, and always this."""


class RequestCounts(msgspec.Struct):
    """Lines of a batch. completed and failed have an answer; the rest is to be done."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchLineError(msgspec.Struct):
    """Why a batch did not begin."""

    code: str
    message: str
    line: int | None = None
    """From 1."""
    param: str | None = None


class BatchErrors(msgspec.Struct):
    """All reasons why a batch did not begin."""

    data: list[BatchLineError]
    object: str = "list"


BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch. Times are seconds since 1970."""

    id: str
    object: str = "batch"
    endpoint: str
    input_file_id: str
    completion_window: str = "24h"
    status: BatchStatus = "validating"
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None


class ExpiresAfter(msgspec.Struct):
    """When the files of a batch are removed."""

    seconds: int
    anchor: str = "created_at"


class BatchBody(msgspec.Struct):
    """Body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


class Page(msgspec.Struct):
    """A page of a list."""

    data: list[Any]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"
