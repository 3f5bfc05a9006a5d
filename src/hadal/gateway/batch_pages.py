"""HTTP endpoints /v1/files and /v1/batches: rows of the table of endpoints (gateway/endpoints).

Every gateway has them if batches are configured; the one with the front processes the batches
(gateway/desk/batches). While the database is down they answer 503. Depends on the store's rows and
the API's JSON.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import msgspec
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from hadal.gateway.api.base import check_metadata
from hadal.gateway.api.batches import BATCH_ENDPOINTS, BATCH_WINDOW, NewBatch
from hadal.gateway.api.decoding import decode
from hadal.gateway.api.description import (
    BATCH_CANCELLED,
    BATCH_CREATED,
    BATCH_READ,
    BATCHES,
    FILE,
    FILE_CONTENT,
    FILE_DELETED,
    FILE_UPLOADED,
    FILES,
)
from hadal.gateway.api.lists import is_ascending, list_page, read_limit
from hadal.gateway.desk.auth import Tenant
from hadal.gateway.desk.batches import WINDOW_S, BatchWorker
from hadal.gateway.desk.gateway import Gateway
from hadal.gateway.desk.reply import ClientGone, send_within
from hadal.gateway.edge.bodies import discard
from hadal.gateway.edge.errors import ApiError, overloaded
from hadal.gateway.edge.guard import SEEN
from hadal.gateway.endpoints import Endpoint
from hadal.runtime.batches import (
    BATCH,
    CANCELLED,
    CANCELLING,
    COMPLETED,
    EXPIRED,
    FAILED,
    FINALIZING,
    IN_PROGRESS,
    PIECE_BYTES,
    VALIDATING,
    BatchesDown,
    BatchRow,
    FileRow,
)

log = logging.getLogger("hadal.batches")

UPLOAD_S = 300.0
"""Maximum time for uploading a file."""
MAX_OPEN_BATCHES = 100
"""Maximum number of open batches per tenant."""
_MULTIPART_BYTES = 1 << 16
"""Allowance for the form's bytes around a file."""
_MAX_FILES, _MAX_BATCHES = 10_000, 100
"""Largest numbers of files and of batches in one page of a list."""


@dataclass
class _Upload:
    """File being uploaded."""

    num_kept: int
    """Bytes of the tenant's files when the upload began."""
    num_bytes: int = 0
    """Bytes received so far."""


class BatchPages:
    """Endpoints for files and batches. Only the gateway with the front runs its `worker`."""

    def __init__(self, gateway: Gateway, worker: BatchWorker) -> None:
        self._gateway, self._worker, self._store = gateway, worker, worker.store
        self._arriving: Counter[str] = Counter()
        """Tenant -> bytes of its uploads in progress."""

    def endpoints(self) -> list[Endpoint]:
        """Return all endpoints for files and batches."""
        file, batch = "/files/{file_id}", "/batches/{batch_id}"
        return [
            Endpoint(method, f"/v1{path}", self._guarded(page), about, (path,))
            for method, path, page, about in (
                ("POST", "/files", self._upload, FILE_UPLOADED),
                ("GET", "/files", self._list_files, FILES),
                ("GET", file, self._get_file, FILE),
                ("DELETE", file, self._delete_file, FILE_DELETED),
                ("GET", f"{file}/content", self._content, FILE_CONTENT),
                ("POST", "/batches", self._create, BATCH_CREATED),
                ("GET", "/batches", self._list_batches, BATCHES),
                ("GET", batch, self._get_batch, BATCH_READ),
                ("POST", f"{batch}/cancel", self._cancel, BATCH_CANCELLED),
            )
        ]

    def _guarded(
        self, page: Callable[[Request, Tenant], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            tenant = self._gateway.tenancy.tenant_of(request.headers)
            request.scope[SEEN].tenant = tenant.name
            try:
                return await page(request, tenant)
            except BatchesDown as error:
                log.error("%s", error)
                said = "Files and batches are unavailable: their database is down. Try again later."
                after_s = self._gateway.intake.patience.retry_after_s
                raise overloaded(503, said, after_s, "no_batches") from error

        return guarded

    # ---- files ----
    async def _upload(self, request: Request, tenant: Tenant) -> Response:
        upload = _Upload(await self._worker.call(self._store.num_bytes, tenant.name))
        try:
            kept = await self._add_file(request, tenant, upload)
        finally:
            self._arriving[tenant.name] -= upload.num_bytes
        if kept is None:
            raise self._too_many_bytes(upload.num_kept)
        return self._json(self._file(kept))

    async def _add_file(self, request: Request, tenant: Tenant, upload: _Upload) -> FileRow | None:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "multipart/form-data":
            raise ApiError(
                415,
                f"The content type is {kind[:100]!r}; send a form of 'multipart/form-data' with a file"
                f" and the purpose {BATCH!r}.",
                code="unsupported_media_type",
            )
        async with self._gateway.intake.bodies.wait(tenant.name, UPLOAD_S):
            try:
                within = Request(request.scope, self._within(request, tenant.name, upload))
                form = await within.form(max_files=1, max_fields=8)
            except (MultiPartException, AssertionError, KeyError, ValueError) as error:
                raise ApiError(400, f"The form is invalid: {error}.", code="bad_form") from error
        try:
            file, purpose = form.get("file"), form.get("purpose")
            for other in form.keys() - {"file", "purpose"}:
                said = f"{other[:100]} is not supported; leave it out."
                raise ApiError(400, said, param=other[:100])
            if purpose != BATCH:
                raise ApiError(400, f"purpose must be {BATCH!r}.", param="purpose")
            if not isinstance(file, UploadFile):
                raise ApiError(
                    400, "The form has no file; send one in the field file.", param="file"
                )
            name = re.sub(r"[^\x20-\x7e]|[/\\]", "_", file.filename or "")[:255] or "file"
            row = FileRow(f"file-{uuid.uuid4().hex}", tenant.name, BATCH, name, 0, self._unix_s())
            most, data = self._worker.config.max_tenant_mb << 20, _read_file(file.file)
            return await self._worker.call(self._store.add_file, row, data, most)
        finally:
            await form.close()

    def _within(self, request: Request, tenant: str, upload: _Upload) -> Receive:
        """Return a receiver of the body's messages that counts their bytes: Content-Length may be
        missing or wrong, and uploads in progress occupy the disk. Too many raise ApiError 413.
        """
        config = self._worker.config
        max_bytes = config.max_file_mb << 20
        max_tenant_bytes = (config.max_tenant_mb << 20) - upload.num_kept

        async def discard_after(message: Message) -> None:
            if message.get("more_body"):
                await discard(request.stream())

        async def receive() -> Message:
            message = await request.receive()
            num_bytes = len(message.get("body", b""))
            upload.num_bytes += num_bytes
            self._arriving[tenant] += num_bytes
            if self._arriving[tenant] > max_tenant_bytes + _MULTIPART_BYTES:
                await discard_after(message)
                raise self._too_many_bytes(upload.num_kept)
            if upload.num_bytes > max_bytes + _MULTIPART_BYTES:
                await discard_after(message)
                raise ApiError(
                    413,
                    f"The file is larger than {config.max_file_mb} MiB; split it.",
                    code="file_too_large",
                    headers={"Connection": "close"},
                )
            return message

        return receive

    def _too_many_bytes(self, num_kept: int) -> ApiError:
        max_mb = self._worker.config.max_tenant_mb
        return ApiError(
            413,
            f"Your stored files have {num_kept >> 20} MiB, and with this upload they exceed the limit of"
            f" {max_mb} MiB; delete some.",
            code="files_too_large",
            headers={"Connection": "close"},
        )

    async def _list_files(self, request: Request, tenant: Tenant) -> Response:
        query = request.query_params
        purpose, after = query.get("purpose", ""), query.get("after", "")
        limit, is_rising = read_limit(query, _MAX_FILES, _MAX_FILES), is_ascending(query)
        rows = await self._worker.call(
            lambda: self._store.files(
                tenant.name, purpose, after, limit + 1, is_ascending=is_rising
            )
        )
        if rows is None:
            raise _missing("file", after)
        return self._json(list_page([self._file(row) for row in rows], limit))

    async def _get_file(self, request: Request, tenant: Tenant) -> Response:
        return self._json(self._file(await self._found_file(request, tenant)))

    async def _delete_file(self, request: Request, tenant: Tenant) -> Response:
        file_id = request.path_params["file_id"]
        if not await self._worker.call(self._store.delete_file, tenant.name, file_id):
            raise _missing("file", file_id)
        return self._json({"id": file_id, "object": "file", "deleted": True})

    async def _content(self, request: Request, tenant: Tenant) -> Response:
        row = await self._found_file(request, tenant)
        pieces = self._store.contents(row.id)

        async def send() -> AsyncIterator[bytes]:
            while (piece := await self._worker.call(next, pieces, None)) is not None:
                yield piece

        return _Contents(send(), row.num_bytes, self._gateway.intake.patience.send_s)

    async def _found_file(self, request: Request, tenant: Tenant) -> FileRow:
        file_id = request.path_params["file_id"]
        row = await self._worker.call(self._store.file, tenant.name, file_id)
        if row is None:
            raise _missing("file", file_id)
        return row

    # ---- batches ----
    async def _create(self, request: Request, tenant: Tenant) -> Response:
        asked = await self._asked(request, tenant)
        file = await self._worker.call(self._store.file, tenant.name, asked.input_file_id)
        if file is None:
            raise _missing("file", asked.input_file_id, "input_file_id")
        if file.purpose != BATCH:
            raise ApiError(
                400,
                f"The file {file.id} has the purpose {file.purpose!r}; send a file of requests.",
                param="input_file_id",
            )
        open_batches = await self._worker.call(self._store.open_batches)
        if sum(one.tenant == tenant.name for one in open_batches) >= MAX_OPEN_BATCHES:
            raise ApiError(
                429,
                f"You have {MAX_OPEN_BATCHES} batches that have not ended, the maximum; wait until one ends.",
                code="too_many_batches",
            )
        now_s = self._unix_s()
        batch = BatchRow(
            id=f"batch_{uuid.uuid4().hex}",
            tenant=tenant.name,
            endpoint=asked.endpoint,
            input_file_id=file.id,
            metadata=asked.metadata or {},
            status=VALIDATING,
            created_s=now_s,
            expires_s=now_s + WINDOW_S,
            times={},
            errors=[],
            output_file_id=None,
            error_file_id=None,
            num_total=0,
            num_completed=0,
            num_failed=0,
        )
        await self._worker.call(self._store.add_batch, batch)
        self._worker.woken.set()
        return self._json(_batch(batch))

    async def _asked(self, request: Request, tenant: Tenant) -> NewBatch:
        asked = decode(await self._gateway.intake.body_of(request, tenant.name), NewBatch)
        if asked.endpoint not in BATCH_ENDPOINTS:
            raise ApiError(
                400,
                f"endpoint is {asked.endpoint[:100]!r}; supported: {' and '.join(BATCH_ENDPOINTS)}.",
                param="endpoint",
            )
        if asked.completion_window != BATCH_WINDOW:
            raise ApiError(
                400, f"completion_window must be {BATCH_WINDOW!r}.", param="completion_window"
            )
        if bytes(asked.output_expires_after) != b"null":
            raise ApiError(
                400,
                f"output_expires_after is not supported: files are kept for"
                f" {self._worker.config.keep_days} days. Leave it out.",
                param="output_expires_after",
            )
        check_metadata(asked.metadata or {})
        return asked

    async def _list_batches(self, request: Request, tenant: Tenant) -> Response:
        query = request.query_params
        limit, after = read_limit(query, _MAX_BATCHES), query.get("after", "")
        rows = await self._worker.call(self._store.batches, tenant.name, after, limit + 1)
        if rows is None:
            raise _missing("batch", after)
        return self._json(list_page([_batch(row) for row in rows], limit))

    async def _get_batch(self, request: Request, tenant: Tenant) -> Response:
        batch_id = request.path_params["batch_id"]
        row = await self._worker.call(self._store.batch, tenant.name, batch_id)
        if row is None:
            raise _missing("batch", batch_id)
        return self._json(_batch(row))

    async def _cancel(self, request: Request, tenant: Tenant) -> Response:
        batch_id = request.path_params["batch_id"]
        row = await self._worker.call(self._store.cancel, tenant.name, batch_id, self._unix_s())
        if row is None:
            raise _missing("batch", batch_id)
        if row.status != CANCELLING:
            raise ApiError(
                409, f"The batch is {row.status} and cannot be cancelled.", code="batch_ended"
            )
        self._worker.woken.set()
        return self._json(_batch(row))

    def _unix_s(self) -> int:
        return int(self._gateway.clock.unix_time())

    def _file(self, row: FileRow) -> dict[str, Any]:
        return {
            "id": row.id,
            "object": "file",
            "bytes": row.num_bytes,
            "created_at": row.created_s,
            "expires_at": row.created_s + self._worker.config.keep_days * WINDOW_S,
            "filename": row.filename,
            "purpose": row.purpose,
            "status": "processed",
        }

    @staticmethod
    def _json(fields: object) -> Response:
        return Response(msgspec.json.encode(fields), media_type="application/json")


class _Contents(StreamingResponse):
    """Response with a file's contents. It closes the connection if the client reads too slowly."""

    def __init__(self, pieces: AsyncIterator[bytes], num_bytes: int, send_s: float) -> None:
        headers = {"Content-Length": str(num_bytes)}
        super().__init__(pieces, headers=headers, media_type="application/octet-stream")
        self._send_s = send_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            await send_within(self._send_s, send, message)

        try:
            await super().__call__(scope, receive, send_in_time)
        except ClientGone:
            scope[SEEN].status = 499
        except BatchesDown as error:
            log.error("the download of a file was cut off: %s", error)


def _read_file(file: IO[bytes]) -> Iterator[bytes]:
    return iter(lambda: file.read(PIECE_BYTES), b"")


def _missing(kind: str, its_id: str, param: str | None = None) -> ApiError:
    return ApiError(404, f"There is no {kind} {its_id[:100]!r}.", param=param, code="not_found")


def _batch(row: BatchRow) -> dict[str, Any]:
    moments = (IN_PROGRESS, FINALIZING, COMPLETED, FAILED, EXPIRED, CANCELLING, CANCELLED)
    return {
        "id": row.id,
        "object": "batch",
        "endpoint": row.endpoint,
        "errors": {"object": "list", "data": row.errors} if row.errors else None,
        "input_file_id": row.input_file_id,
        "completion_window": BATCH_WINDOW,
        "status": row.status,
        "output_file_id": row.output_file_id,
        "error_file_id": row.error_file_id,
        "created_at": row.created_s,
        "expires_at": row.expires_s,
        **{f"{moment}_at": row.times.get(moment) for moment in moments},
        "request_counts": {
            "total": row.num_total,
            "completed": row.num_completed,
            "failed": row.num_failed,
        },
        "metadata": row.metadata or None,
    }
