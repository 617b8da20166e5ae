"""/v1/files and /v1/batches."""

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Final

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from localchat.batch.input_file import PATHS
from localchat.sanitize import sanitize_line
from localchat.server.errors import ApiError, bad_request, unavailable
from localchat.server.formatters import json_response
from localchat.server.multipart import UploadForm, read_form
from localchat.server.openai_batches.protocol import (
    BatchBody,
    BatchObject,
    ExpiresAfter,
    FileObject,
    Page,
)
from localchat.server.openai_batches.runner import BatchRunner
from localchat.server.openai_batches.store import (
    KEPT_S,
    OPEN,
    BatchRecord,
    FileRecord,
    new_batch_id,
    new_file_id,
)
from localchat.server.request_body import read_json
from localchat.server.state import Service, client_of

_PURPOSE: Final = "batch"
_WINDOW: Final = "24h"
_LEAST_KEPT_S: Final = 3600
_MAX_NAME: Final = 200
_MAX_PAGE: Final = 10_000
_MAX_BATCH_PAGE: Final = 100
_METADATA: Final = (16, 64, 512)
"""Most entries; the longest key and value."""


class BatchEndpoints:
    """Routes of one server. A client sees the files and batches of its own API key alone."""

    def __init__(self, service: Service, runner: BatchRunner) -> None:
        self._limits = service.config.limits
        self._runner = runner
        self._store = runner.store
        self._adding = threading.Lock()
        """Of the thread that adds a file: two that look for room at once would both find it."""

    def routes(self) -> list[Route]:
        """The routes, without `/v1`."""
        return [
            Route("/files", self.upload, methods=["POST"]),
            Route("/files", self.files, methods=["GET"]),
            Route("/files/{id}", self.file, methods=["GET"]),
            Route("/files/{id}", self.delete, methods=["DELETE"]),
            Route("/files/{id}/content", self.content, methods=["GET"]),
            Route("/batches", self.create, methods=["POST"]),
            Route("/batches", self.batches, methods=["GET"]),
            Route("/batches/{id}", self.batch, methods=["GET"]),
            Route("/batches/{id}/cancel", self.cancel, methods=["POST"]),
        ]

    # ------------------------------------------------------------------------ files

    async def upload(self, request: Request) -> Response:
        """Keep a file. Raises ApiError."""
        await asyncio.to_thread(self._store.prepare)
        form = await read_form(request, self._limits, self._store.folder)
        try:
            return json_response(await asyncio.to_thread(self._add, form, client_of(request).salt))
        finally:
            form.content.unlink(missing_ok=True)

    def _add(self, form: UploadForm, owner: str) -> FileObject:
        if not form.filename:
            raise _missing("file")
        if "purpose" not in form.fields:
            raise _missing("purpose")
        if form.fields["purpose"] != _PURPOSE:
            raise bad_request(
                f"The purpose is {form.fields['purpose'][:50]!r}; this server takes files for 'batch'.",
                param="purpose",
            )
        if not form.size:
            raise bad_request("The file is empty.", param="file")
        now_s = int(time.time())
        file = FileObject(
            id=new_file_id(),
            bytes=form.size,
            created_at=now_s,
            expires_at=now_s + _kept_s(form),
            filename=sanitize_line(form.filename)[-_MAX_NAME:],
            purpose=_PURPOSE,
        )
        with self._adding:
            if self._store.used_bytes + form.size > self._limits.stored_bytes:
                raise ApiError(
                    413,
                    "storage_full",
                    f"All files together would be larger than {self._limits.stored_bytes} bytes; delete "
                    "some with DELETE /v1/files/{id}.",
                    param="file",
                )
            self._store.add_file(FileRecord(owner, file), form.content)
        return file

    async def files(self, request: Request) -> Response:
        """List files, newest first."""
        records = await asyncio.to_thread(self._store.files, client_of(request).salt)
        found = [record.file for record in records]
        if purpose := request.query_params.get("purpose"):
            found = [file for file in found if file.purpose == purpose]
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise bad_request("The field 'order' must be asc or desc.", param="order")
        if order == "asc":
            found.reverse()
        return _page(request, found, _MAX_PAGE, _MAX_PAGE)

    async def file(self, request: Request) -> Response:
        """Describe a file. Raises ApiError."""
        return json_response(self._file(request).file)

    async def content(self, request: Request) -> Response:
        """Send the content of a file. Raises ApiError."""
        record = self._file(request)
        path = self._store.content(record.file.id)
        return FileResponse(path, media_type="application/octet-stream")

    async def delete(self, request: Request) -> Response:
        """Remove a file. Raises ApiError."""
        id_ = self._file(request).file.id
        # Without a turn of the event loop between look and act, as in `create`: neither may come between.
        for one in self._store.batches():
            if one.batch.input_file_id == id_ and one.batch.status in OPEN:
                raise ApiError(
                    409,
                    "file_in_use",
                    f"The file is the input of {one.batch.id}, which is {one.batch.status}; cancel it first.",
                )
        self._store.delete_file(id_)
        return json_response({"id": id_, "object": "file", "deleted": True})

    def _file(self, request: Request) -> FileRecord:
        id_ = request.path_params["id"]
        return self._file_of(id_, client_of(request).salt, None)

    def _file_of(self, id_: str, owner: str, param: str | None) -> FileRecord:
        found = self._store.file(id_, owner)
        if found is None:
            raise ApiError(404, "file_not_found", f"There is no file {id_[:50]!r}.", param=param)
        return found

    # ------------------------------------------------------------------------ batches

    async def create(self, request: Request) -> Response:
        """Begin a batch. Raises ApiError."""
        body = await read_json(request, BatchBody, self._limits)
        owner = client_of(request).salt
        if body.endpoint not in PATHS:
            raise bad_request(
                f"The endpoint is {body.endpoint[:50]!r}; the choices are {', '.join(PATHS)}.",
                param="endpoint",
            )
        if body.completion_window != _WINDOW:
            raise bad_request(
                f"The completion window must be {_WINDOW!r}.", param="completion_window"
            )
        _check_metadata(body.metadata)
        kept_s = _checked_kept_s(body.output_expires_after)
        self._check_active()
        self._file_of(body.input_file_id, owner, "input_file_id")
        open_ = [one for one in self._store.batches() if one.batch.status in OPEN]
        if len(open_) >= self._limits.batches:
            raise ApiError(
                429,
                "too_many_batches",
                f"{len(open_)} batches are not done yet; try again when one is, or cancel one.",
                kind="rate_limit_error",
            )
        now_s = int(time.time())
        batch = BatchObject(
            id=new_batch_id(),
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            created_at=now_s,
            expires_at=now_s + int(self._limits.batch_s),
            metadata=body.metadata,
        )
        self._store.save(BatchRecord(owner, batch, kept_s))
        self._runner.wake()
        return json_response(batch)

    async def batches(self, request: Request) -> Response:
        """List batches, newest first."""
        owner = client_of(request).salt
        records = await asyncio.to_thread(self._store.batches, owner)
        found = [self._runner.find(one.batch.id, owner) or one for one in records]
        return _page(request, [one.batch for one in found], 20, _MAX_BATCH_PAGE)

    async def batch(self, request: Request) -> Response:
        """Describe a batch. Raises ApiError."""
        return json_response(self._batch(request).batch)

    async def cancel(self, request: Request) -> Response:
        """Cancel a batch that is not done. Raises ApiError."""
        record = self._batch(request)
        status = record.batch.status
        if status in ("validating", "in_progress"):
            self._check_active()
            record = self._runner.cancel(record)
        elif status not in ("cancelling", "cancelled"):
            raise ApiError(
                409,
                "batch_not_cancellable",
                f"The batch is {status}; only one that is validating or in progress can be cancelled.",
            )
        return json_response(record.batch)

    def _batch(self, request: Request) -> BatchRecord:
        id_ = request.path_params["id"]
        found = self._runner.find(id_, client_of(request).salt)
        if found is None:
            raise ApiError(404, "batch_not_found", f"There is no batch {id_[:50]!r}.")
        return found

    def _check_active(self) -> None:
        if not self._runner.active:
            raise unavailable(
                "Another localchat server runs the batches of this folder; send this to it, or end it.",
                "batches_elsewhere",
                retry_s=5,
            )


def _page(
    request: Request, found: Sequence[FileObject | BatchObject], size: int, largest: int
) -> Response:
    """The page that a request asks for by `limit` and `after`. Raises ApiError."""
    asked = request.query_params.get("limit", str(size))
    if not asked.isdecimal() or not 1 <= int(asked) <= largest:
        raise bad_request(f"The field 'limit' must be 1 to {largest}.", param="limit")
    if after := request.query_params.get("after"):
        places = [at for at, one in enumerate(found) if one.id == after]
        if not places:
            raise bad_request(f"There is no {after[:50]!r} to go on after.", param="after")
        found = found[places[0] + 1 :]
    page = list(found[: int(asked)])
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return json_response(Page(page, len(found) > len(page), first, last))


def _kept_s(form: UploadForm) -> int:
    fields = form.fields
    if "expires_after[seconds]" not in fields and "expires_after[anchor]" not in fields:
        return KEPT_S
    text = fields.get("expires_after[seconds]", "")
    anchor = fields.get("expires_after[anchor]", "created_at")
    return _checked_kept_s(ExpiresAfter(int(text) if text.isdecimal() else 0, anchor))


def _checked_kept_s(asked: ExpiresAfter | None) -> int:
    if asked is None:
        return KEPT_S
    if asked.anchor != "created_at" or not _LEAST_KEPT_S <= asked.seconds <= KEPT_S:
        raise bad_request(
            f"Files expire {_LEAST_KEPT_S} to {KEPT_S} seconds after 'created_at'.",
            param="expires_after",
        )
    return asked.seconds


def _check_metadata(given: dict[str, str] | None) -> None:
    entries, key, value = _METADATA
    given = given or {}
    if len(given) > entries or any(
        len(name) > key or len(text) > value for name, text in given.items()
    ):
        raise bad_request(
            f"Metadata has at most {entries} entries, with keys of {key} and values of {value} characters.",
            param="metadata",
        )


def _missing(field: str) -> ApiError:
    return bad_request(
        f"The field {field!r} is required.", param=field, code="missing_required_parameter"
    )
