"""/v1/files and /v1/batches: requests for which nobody waits, from a JSONL file into another.

    file --POST /batches--> validating --lines are read--> in progress --all answered--> completed

Every gateway takes files and batches; the one with the front works on them. A line is begun where the
front says that the load leaves room (policy/admission.admit_batch), one after the other, tenants in
turns, of each its oldest batch. An answer is written down before it is charged: what a crash takes is
done again, and is never charged twice. Knows the store's rows and the API's JSON.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import IO, Any, TypeVar

import msgspec
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message

from hadal.core.config import BatchesConfig
from hadal.core.errors import HadalError, RequestError
from hadal.gateway.auth import EVERYONE, Tenant
from hadal.gateway.errors import ApiError, as_api_error
from hadal.gateway.http import FINGERPRINT, Gateway
from hadal.gateway.mailbox import Mailbox
from hadal.gateway.openai import check_metadata, decode
from hadal.gateway.replies import ChatFormatter, CompletionFormatter, Head, Reply, Times
from hadal.gateway.service import Work
from hadal.policy.admission import NO_VALLEY, VALLEY_S
from hadal.policy.fairness import batch_of
from hadal.policy.quotas import NEVER_CODE
from hadal.runtime.batches import (
    BATCH,
    CANCELLED,
    CANCELLING,
    COMPLETED,
    EXPIRED,
    FINALIZING,
    IN_PROGRESS,
    PIECE_BYTES,
    VALIDATING,
    BatchesDown,
    BatchLine,
    BatchRow,
    BatchStore,
    FileRow,
)

log = logging.getLogger("hadal.batches")

T = TypeVar("T")

WINDOW = "24h"
WINDOW_S = 86_400
UPLOAD_S = 300.0
"""How long a file may take to come."""
MAX_CUSTOM_ID_CHARS = 512
MAX_OPEN_BATCHES = 100
"""Of a tenant."""
MAX_ERRORS = 100
"""Of a batch's input that are listed."""
MAX_TRIES = 6
"""Of a line, where it is the server that fails."""
_LOOK_S = 1.0
"""Time between two looks for what other gateways took."""
_AGAIN_S = 5.0
_FORGET_S = 3600.0
_AHEAD = 16
"""Lines read at once."""
_ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
_LATER = (429, 500, 503, 504)
"""Statuses after which a line is tried again."""
_MULTIPART_BYTES = 1 << 16
"""What stands around a file in its form."""
_BATCH_SALT = b"hadal-batch-1"


class BatchWorker:
    """Reads, answers and ends the batches of all tenants. Used by the event loop's thread."""

    def __init__(self, gateway: Gateway, store: BatchStore, config: BatchesConfig) -> None:
        self.store, self.config, self._gateway = store, config, gateway
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._turn = asyncio.Lock()
        """Held by whoever waits for room: first come, first served."""
        self._slots = asyncio.Semaphore(config.max_running)
        self._drivers: dict[str, asyncio.Task[None]] = {}
        """Batch id -> who works on it."""
        self._stopped: set[str] = set()
        """Batches of which no line is to be begun any more."""
        self.woken = asyncio.Event()
        self.num_waiting = self.num_running = 0
        self.outcomes: Counter[str] = Counter({"completed": 0, "failed": 0, "again": 0})

    async def call(self, function: Callable[..., T], *given: Any) -> T:
        """One of the store's methods, off the event loop. Raises BatchesDown."""
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: function(*given)
        )

    async def run(self) -> None:
        """Work until cancelled."""
        was_said, forgot_s = False, -_FORGET_S
        try:
            while True:
                self.woken.clear()
                try:
                    if self._gateway.now() - forgot_s >= _FORGET_S:
                        forgot_s = self._gateway.now()
                        kept_s = self.config.keep_days * WINDOW_S
                        await self.call(self.store.forget, self._unix_s() - kept_s)
                    await self._look()
                    was_said = False
                except BatchesDown as error:
                    if not was_said:
                        log.error("batches stand still: %s", error)
                    was_said = True
                try:
                    async with asyncio.timeout(_LOOK_S):
                        await self.woken.wait()
                except TimeoutError:
                    continue
        finally:
            drivers = list(self._drivers.values())
            for driver in drivers:
                driver.cancel()
            await asyncio.gather(*drivers, return_exceptions=True)

    def close(self) -> None:
        """No more calls come."""
        self._thread.shutdown(wait=True)
        self.store.close()

    def _unix_s(self) -> int:
        return int(self._gateway.unix_time())

    async def _look(self) -> None:
        """Find out what is to be done, and see that somebody does it."""
        batches = await self.call(self.store.open_batches)
        self.num_waiting = sum(
            batch.num_total - batch.num_completed - batch.num_failed
            for batch in batches
            if batch.status == IN_PROGRESS
        )
        busy: set[str] = set()
        for batch in batches:
            if batch.status == CANCELLING or self._unix_s() >= batch.expires_s:
                self._stopped.add(batch.id)
            is_in_turn = batch.tenant not in busy or batch.id in self._stopped
            busy.add(batch.tenant)
            if batch.id not in self._drivers and is_in_turn and not self._gateway.host.draining:
                task = asyncio.get_running_loop().create_task(self._drive(batch))
                self._drivers[batch.id] = task
                task.add_done_callback(partial(self._ended, batch.id))

    def _ended(self, batch_id: str, task: asyncio.Task[None]) -> None:
        del self._drivers[batch_id]
        self._stopped.discard(batch_id)
        self.woken.set()

    async def _drive(self, batch: BatchRow) -> None:
        """Take a batch as far as it goes."""
        try:
            if batch.status == VALIDATING and batch.id not in self._stopped:
                await self._validate(batch)
                return
            tenant = self._tenant(batch.tenant)
            is_late = self._unix_s() >= batch.expires_s
            if batch.status == IN_PROGRESS and tenant is not None and not is_late:
                if not await self._answer_all(batch, tenant):
                    return  # It goes on after a look at how it stands now.
            elif tenant is None and self._gateway.keys.is_known:
                log.warning(
                    "%s is cancelled: tenant %s has no key any more", batch.id, batch.tenant
                )
                await self.call(self.store.cancel, batch.tenant, batch.id, self._unix_s())
            elif tenant is None:
                await asyncio.sleep(_LOOK_S)
                return
            await self._end(batch)
        except BatchesDown as error:
            log.error("%s stands still: %s", batch.id, error)
            await asyncio.sleep(_AGAIN_S)
        except Exception:
            log.exception("%s stands still", batch.id)
            await asyncio.sleep(_AGAIN_S)

    async def _end(self, batch: BatchRow) -> None:
        now = await self.call(self.store.batch, batch.tenant, batch.id)
        if now is None:
            return
        is_whole = now.status == IN_PROGRESS and now.num_completed + now.num_failed == now.num_total
        is_late = (
            self._unix_s() >= batch.expires_s
            and now.status in (VALIDATING, IN_PROGRESS)
            and not is_whole
        )
        status = CANCELLED if now.status == CANCELLING else EXPIRED if is_late else COMPLETED
        if status == COMPLETED:
            await self.call(self.store.finalize, now, self._unix_s())
        ids = (f"file-{uuid.uuid4().hex}", f"file-{uuid.uuid4().hex}")
        expired = b""
        if status == EXPIRED:
            said = "This request was not begun before its batch's completion window ended."
            expired = b'"response":null,"error":' + msgspec.json.encode(
                {"code": "batch_expired", "message": said}
            )
        ended = await self.call(self.store.end, now, status, self._unix_s(), ids, expired)
        if ended is not None:
            num = f"{ended.num_completed} of {ended.num_total} requests answered"
            log.info("%s of %s is %s: %s", batch.id, batch.tenant, status, num)

    # ---- reading ----
    async def _validate(self, batch: BatchRow) -> None:
        lines, errors = await self.call(self._read, batch)
        if errors:
            await self.call(self.store.fail, batch, errors, self._unix_s())
        else:
            await self.call(self.store.begin, batch, lines, self._unix_s())

    def _read(self, batch: BatchRow) -> tuple[list[BatchLine], list[dict[str, Any]]]:
        lines: list[BatchLine] = []
        errors: list[dict[str, Any]] = []
        seen: set[str] = set()
        for number, raw in enumerate(_lines_of(self.store.contents(batch.input_file_id)), 1):
            if not raw.strip():
                continue
            if len(lines) == self.config.max_lines:
                said = f"The file has more than {self.config.max_lines} requests."
                errors.append(_error("too_many_requests", said, None, number))
                break
            line = _line_of(
                raw, number, batch.endpoint, self._gateway.service.limits.max_body_bytes
            )
            if isinstance(line, BatchLine) and line.custom_id in seen:
                said = f"The custom_id {line.custom_id[:100]!r} stands in the file twice."
                line = _error("duplicate_custom_id", said, "custom_id", number)
            if isinstance(line, BatchLine):
                seen.add(line.custom_id)
                lines.append(line)
            elif len(errors) < MAX_ERRORS:
                errors.append(line)
        if not lines and not errors:
            errors.append(_error("empty_file", "The file has no request in it.", None, None))
        return lines, errors

    # ---- answering ----
    def _tenant(self, name: str) -> Tenant | None:
        """As it is now; None: nobody has its key, or keys are not known yet."""
        keys = self._gateway.keys
        if keys.is_open:
            return keys.check(None) if name == EVERYONE else None
        return next((tenant for tenant in keys.tenants if tenant.name == name), None)

    async def _answer_all(self, batch: BatchRow, tenant: Tenant) -> bool:
        """Answer all lines; False if some have no answer, as the batch or the server is to end."""
        tries: Counter[int] = Counter()
        while batch.id not in self._stopped:
            after, begun = -1, 0
            async with asyncio.TaskGroup() as tasks:
                while lines := await self.call(self.store.waiting, batch.id, after, _AHEAD):
                    for line in lines:
                        if batch.id in self._stopped or self._gateway.host.draining:
                            return False
                        after, begun = line.number, begun + 1
                        await self._begin(batch, line, tenant, tries, tasks)
            if not begun:
                return True
        return False

    async def _begin(
        self,
        batch: BatchRow,
        line: BatchLine,
        tenant: Tenant,
        tries: Counter[int],
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Read a line, wait for room, and let it run as one of `tasks`."""
        request_id = f"{'chatcmpl' if 'chat' in batch.endpoint else 'cmpl'}-{uuid.uuid4().hex}"
        try:
            work = await self._prepared(batch, line, tenant, request_id)
            generations = self._gateway.priced(work, tenant, is_batch=True)
            if not await self._has_room(batch, tenant, generations):
                return
        except HadalError as error:
            await self._refuse(batch, line, request_id, as_api_error(error), tries)
            return
        # Only now: a tenant whose quota fills again takes no slot from the others meanwhile.
        await self._slots.acquire()
        is_begun = False
        try:
            if batch.id not in self._stopped and not self._gateway.host.draining:
                times = Times(self._gateway.now(), is_read=True)
                mailbox = self._gateway.host.open(generations)
                formatter = ChatFormatter if "chat" in batch.endpoint else CompletionFormatter
                model = self._gateway.service.model
                head = Head(request_id, self._unix_s(), model.name, FINGERPRINT)
                reply = Reply(
                    work,
                    mailbox,
                    self._gateway.host,
                    formatter(head, model.vocabulary),
                    times,
                    self._gateway.now,
                    timeout_s=self._gateway.service.limits.request_timeout_s,
                    keep_alive_s=self._gateway.patience.keep_alive_s,
                    send_timeout_s=self._gateway.patience.send_s,
                )
                run = self._run(batch, line, tenant, work, mailbox, reply, request_id, tries)
                tasks.create_task(run)
                is_begun = True
        finally:
            if not is_begun:
                self._slots.release()

    async def _prepared(
        self, batch: BatchRow, line: BatchLine, tenant: Tenant, request_id: str
    ) -> Work:
        name = batch_of(tenant.name)
        salt = (
            tenant.salt or blake2b(tenant.name.encode(), digest_size=32, key=_BATCH_SALT).digest()
        )  # A hashed key is not known while nobody sends it.
        asking = replace(tenant, given_name=name, salt=salt)
        service = self._gateway.service
        make = service.chat if "chat" in batch.endpoint else service.completion
        work = await make(line.body, request_id, asking)
        if work.ask.stream:
            raise ApiError(400, "stream: a batch has no streams; leave it out.", param="stream")
        return work

    async def _has_room(
        self, batch: BatchRow, tenant: Tenant, generations: tuple[Any, ...]
    ) -> bool:
        """Wait until the load leaves room for this, and the tenant's quota lets it in. False: it is
        not to be begun any more. Raises ApiError where no waiting helps.
        """
        host, name = self._gateway.host, batch_of(tenant.name)
        num_tokens = sum(len(one.prompt) for one in generations)
        most = sum(one.most_pico_usd for one in generations)
        while batch.id not in self._stopped and not host.draining:
            wait_s = 0.0
            async with self._turn:
                while batch.id not in self._stopped and not host.draining and not wait_s:
                    try:
                        host.check_room(name, len(generations), num_tokens, most)
                        return True
                    except ApiError as refusal:
                        if refusal.code == NEVER_CODE:
                            raise
                        if refusal.code != NO_VALLEY:
                            wait_s = float(refusal.headers.get("Retry-After", 1))
                        else:
                            await asyncio.sleep(VALLEY_S)
            await asyncio.sleep(min(wait_s, _LOOK_S))
        return False

    async def _run(
        self,
        batch: BatchRow,
        line: BatchLine,
        tenant: Tenant,
        work: Work,
        mailbox: Mailbox,
        reply: Reply,
        request_id: str,
        tries: Counter[int],
    ) -> None:
        """Take a line's tokens in, write its answer down, then what it cost."""
        body, is_written, end = bytearray(), False, "500"

        async def send(message: Message) -> None:
            body.extend(message.get("body", b""))

        self.num_running += 1
        try:
            end = str(await reply.send_whole(send))
            is_written = await self._write(batch, line, request_id, 200, bytes(body))
        except HadalError as error:
            refusal = as_api_error(error)
            end = str(refusal.status)
            is_written = await self._refuse(batch, line, request_id, refusal, tries)
        finally:
            self.num_running -= 1
            self._slots.release()
            accounting = self._gateway.accounting

            def write_down() -> None:
                if accounting is not None and is_written:
                    start_s = reply.times.start_s
                    accounting.close(
                        work, reply.meters, mailbox.closings, start_s, tenant, end, is_batch=True
                    )

            self._gateway.host.close(mailbox, write_down)

    async def _write(
        self, batch: BatchRow, line: BatchLine, request_id: str, status: int, body: bytes
    ) -> bool:
        head = f'"response":{{"status_code":{status},"request_id":"{request_id}","body":'
        answer = head.encode() + body + b'},"error":null'
        is_error = status != 200
        write = self.store.answer
        while True:
            try:
                is_new = await self.call(
                    lambda: write(batch.id, line.number, answer, is_error=is_error)
                )
                break
            except BatchesDown as error:
                if self._unix_s() >= batch.expires_s:
                    raise
                log.error("an answer of %s is not written down yet: %s", batch.id, error)
                await asyncio.sleep(_AGAIN_S)
        self.outcomes["failed" if is_error else "completed"] += is_new
        return is_new

    async def _refuse(
        self,
        batch: BatchRow,
        line: BatchLine,
        request_id: str,
        error: ApiError,
        tries: Counter[int],
    ) -> bool:
        """A line that has no answer: its error is one, unless it is the server that failed."""
        tries[line.number] += 1
        if error.status in _LATER and error.code != NEVER_CODE and tries[line.number] < MAX_TRIES:
            self.outcomes["again"] += 1
            await asyncio.sleep(_LOOK_S)
            return False
        return await self._write(batch, line, request_id, error.status, error.body)


def _lines_of(pieces: Iterator[bytes]) -> Iterator[bytes]:
    held: list[bytes] = []  # Of one line: joined once, however many pieces it has.
    for piece in pieces:
        first, *rest = piece.split(b"\n")
        held.append(first)
        if rest:
            yield b"".join(held)
            yield from rest[:-1]
            held = [rest[-1]]
    if last := b"".join(held):
        yield last


class _InputLine(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


_decode_line = msgspec.json.Decoder(_InputLine).decode


def _line_of(raw: bytes, number: int, endpoint: str, max_bytes: int) -> BatchLine | dict[str, Any]:
    """A line, or what is wrong with it."""
    try:
        line = _decode_line(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return _error(
            "invalid_json_line", f"The line is no request of a batch: {error}.", None, number
        )
    except RecursionError:
        return _error("invalid_json_line", "The line is nested too deeply.", None, number)
    if "\0" in line.custom_id:
        return _error("invalid_custom_id", "custom_id holds a null.", "custom_id", number)
    if not 1 <= len(line.custom_id) <= MAX_CUSTOM_ID_CHARS:
        said = f"custom_id needs 1 to {MAX_CUSTOM_ID_CHARS} characters."
        return _error("invalid_custom_id", said, "custom_id", number)
    if line.method != "POST":
        return _error("invalid_method", "method has to be 'POST'.", "method", number)
    if line.url != endpoint:
        said = f"url is {line.url[:100]!r}; the batch's endpoint is {endpoint!r}."
        return _error("mismatched_endpoint", said, "url", number)
    body = bytes(line.body)
    if not body.startswith(b"{"):
        return _error("invalid_body", "body has to be an object.", "body", number)
    if len(body) > max_bytes:
        said = f"body has more than {max_bytes} bytes."
        return _error("body_too_large", said, "body", number)
    return BatchLine(number, line.custom_id, body)


def _error(code: str, message: str, param: str | None, line: int | None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param, "line": line}


# The API's pages.


class _NewBatch(msgspec.Struct, forbid_unknown_fields=True):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: msgspec.Raw | None = None


class BatchPages:
    """Files and batches over HTTP. `worker`: also where another gateway works on them."""

    def __init__(self, gateway: Gateway, worker: BatchWorker) -> None:
        self._gateway, self._worker, self._store = gateway, worker, worker.store

    def routes(self) -> list[Route]:
        """All of them."""
        found: list[Route] = []
        for prefix in ("/v1", ""):
            for path, method, page in (
                ("/files", "POST", self._upload),
                ("/files", "GET", self._list_files),
                ("/files/{file_id}", "GET", self._get_file),
                ("/files/{file_id}", "DELETE", self._delete_file),
                ("/files/{file_id}/content", "GET", self._content),
                ("/batches", "POST", self._create),
                ("/batches", "GET", self._list_batches),
                ("/batches/{batch_id}", "GET", self._get_batch),
                ("/batches/{batch_id}/cancel", "POST", self._cancel),
            ):
                found.append(Route(f"{prefix}{path}", self._guarded(page), methods=[method]))
        return found

    def _guarded(
        self, page: Callable[[Request, Tenant], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            tenant = self._gateway.tenant_of(request)
            try:
                return await page(request, tenant)
            except BatchesDown as error:
                log.error("%s", error)
                raise ApiError(
                    503, "Files and batches cannot be had now; try again.", code="no_batches"
                ) from error
            except RequestError as error:
                raise as_api_error(error) from error

        return guarded

    # ---- files ----
    async def _upload(self, request: Request, tenant: Tenant) -> Response:
        config = self._worker.config
        most = config.max_file_mb << 20
        had = await self._worker.call(self._store.num_bytes, tenant.name)
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await request.receive()
            received += len(message.get("body", b""))
            if received > most + _MULTIPART_BYTES:
                raise ApiError(
                    413,
                    f"The file is larger than {config.max_file_mb} MiB; send several.",
                    code="file_too_large",
                    headers={"Connection": "close"},
                )
            return message

        async with self._gateway.bodies.wait(tenant.name, UPLOAD_S):
            try:
                form = await Request(request.scope, counted).form(max_files=1, max_fields=8)
            except (MultiPartException, AssertionError, KeyError, ValueError) as error:
                raise ApiError(
                    400, f"The form cannot be read: {error}.", code="bad_form"
                ) from error
        try:
            file, purpose = form.get("file"), form.get("purpose")
            if purpose != BATCH:
                raise ApiError(400, f"purpose has to be {BATCH!r}.", param="purpose")
            if not isinstance(file, UploadFile):
                raise ApiError(400, "file is missing; send the form's file.", param="file")
            if had + (file.size or 0) > config.max_tenant_mb << 20:
                raise ApiError(
                    413,
                    f"Your files have {had >> 20} MiB, and {config.max_tenant_mb} MiB are the most;"
                    " delete some.",
                    code="files_too_large",
                )
            name = re.sub(r"[^\x20-\x7e]|[/\\]", "_", file.filename or "")[:255] or "file"
            row = FileRow(f"file-{uuid.uuid4().hex}", tenant.name, BATCH, name, 0, self._unix_s())
            row = await self._worker.call(self._store.add_file, row, _read_file(file.file))
        finally:
            await form.close()
        return self._json(self._file(row))

    async def _list_files(self, request: Request, tenant: Tenant) -> Response:
        query = request.query_params
        purpose, order = query.get("purpose", ""), query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise ApiError(400, "order has to be 'asc' or 'desc'.", param="order")
        limit, after = _limit(request, 10_000), query.get("after", "")
        rows = await self._worker.call(
            lambda: self._store.files(
                tenant.name, purpose, after, limit + 1, is_ascending=order == "asc"
            )
        )
        if rows is None:
            raise _missing("file", after)
        return self._page([self._file(row) for row in rows], limit)

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

        return StreamingResponse(send(), media_type="application/octet-stream")

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
                400, f"The file {file.id} is for {file.purpose!r}.", param="input_file_id"
            )
        open_batches = await self._worker.call(self._store.open_batches)
        if sum(one.tenant == tenant.name for one in open_batches) >= MAX_OPEN_BATCHES:
            raise ApiError(
                429,
                f"{MAX_OPEN_BATCHES} of your batches have not ended; wait for one.",
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

    async def _asked(self, request: Request, tenant: Tenant) -> _NewBatch:
        asked = decode(await self._gateway.body_of(request, tenant), _NewBatch)
        if asked.endpoint not in _ENDPOINTS:
            raise ApiError(
                400,
                f"endpoint is {asked.endpoint[:100]!r}; {' and '.join(_ENDPOINTS)} can be asked.",
                param="endpoint",
            )
        if asked.completion_window != WINDOW:
            raise ApiError(
                400, f"completion_window has to be {WINDOW!r}.", param="completion_window"
            )
        if asked.output_expires_after is not None:
            raise ApiError(
                400,
                f"output_expires_after: files are kept for {self._worker.config.keep_days} days;"
                " leave it out.",
                param="output_expires_after",
            )
        check_metadata(asked.metadata or {})
        return asked

    async def _list_batches(self, request: Request, tenant: Tenant) -> Response:
        limit, after = _limit(request, 100), request.query_params.get("after", "")
        rows = await self._worker.call(self._store.batches, tenant.name, after, limit + 1)
        if rows is None:
            raise _missing("batch", after)
        return self._page([_batch(row) for row in rows], limit)

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
        return int(self._gateway.unix_time())

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

    def _page(self, objects: list[dict[str, Any]], limit: int) -> Response:
        """`objects`: one more than fits, if there are more."""
        shown = objects[:limit]
        return self._json(
            {
                "object": "list",
                "data": shown,
                "first_id": shown[0]["id"] if shown else None,
                "last_id": shown[-1]["id"] if shown else None,
                "has_more": len(objects) > limit,
            }
        )

    @staticmethod
    def _json(fields: object) -> Response:
        return Response(msgspec.json.encode(fields), media_type="application/json")


def _read_file(file: IO[bytes]) -> Iterator[bytes]:
    return iter(lambda: file.read(PIECE_BYTES), b"")


def _limit(request: Request, most: int) -> int:
    text = request.query_params.get("limit", str(min(most, 10_000) if most > 100 else 20))
    if not re.fullmatch("[0-9]{1,6}", text) or not 1 <= int(text) <= most:
        raise ApiError(400, f"limit is {text[:40]!r}; 1 to {most} is possible.", param="limit")
    return int(text)


def _missing(kind: str, its_id: str, param: str | None = None) -> ApiError:
    return ApiError(404, f"There is no {kind} {its_id[:100]!r}.", param=param, code="not_found")


def _batch(row: BatchRow) -> dict[str, Any]:
    moments = (IN_PROGRESS, FINALIZING, COMPLETED, "failed", EXPIRED, CANCELLING, CANCELLED)
    return {
        "id": row.id,
        "object": "batch",
        "endpoint": row.endpoint,
        "errors": {"object": "list", "data": row.errors} if row.errors else None,
        "input_file_id": row.input_file_id,
        "completion_window": WINDOW,
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
