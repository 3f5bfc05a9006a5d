"""Process the batches of /v1/batches: requests from a JSONL file, answered into another file.

    file --POST /batches--> validating --lines are read--> in progress --all answered--> completed

Every gateway accepts files and batches (gateway/batch_pages); the one with the front processes
them. A line starts when the front reports spare capacity (policy/admission.admit_batch) and the
tenant's quota admits all of its generations. Tenants take turns, line by line; a tenant's oldest
batch goes first. Depends on the store's rows and the API's JSON, not on HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec
from starlette.types import Message

from hadal.core.config import BatchesConfig
from hadal.core.errors import HadalError
from hadal.core.facts import RequestFact
from hadal.core.messages.requests import Ticket
from hadal.gateway.api.batches import BATCH_ENDPOINTS
from hadal.gateway.desk.auth import Tenant
from hadal.gateway.desk.batch_charges import BatchCharges
from hadal.gateway.desk.batch_lines import line_error, read_lines
from hadal.gateway.desk.dialects import dialects_of
from hadal.gateway.desk.gateway import Gateway
from hadal.gateway.desk.reply import Reply, Times
from hadal.gateway.desk.salts import EVERYONE
from hadal.gateway.desk.service import Work
from hadal.gateway.edge.errors import ApiError, as_api_error, internal_error
from hadal.policy.admission import BATCH_RETRY_S, NO_SPARE
from hadal.policy.fairness import batch_of
from hadal.policy.quotas import NEVER_CODE
from hadal.runtime.batches import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    EXPIRED,
    IN_PROGRESS,
    VALIDATING,
    BatchesDown,
    BatchLine,
    BatchRow,
    BatchStore,
)

log = logging.getLogger("hadal.batches")

T = TypeVar("T")

WINDOW_S = 86_400
MAX_TRIES = 6
"""Maximum tries of a line that fails by the server's fault. Failures for lack of capacity (_LOAD)
do not count as tries; such a line is retried until its batch expires.
"""
WITHDRAWN_S = 60.0
"""Time for which a tenant has no key before its batches are cancelled."""
_LOOK_S = 1.0
"""Period of reading the open batches from the store, to which other gateways add some."""
_AGAIN_S = 5.0
_FORGET_S = 3600.0
_AHEAD = 16
"""Number of lines read from the store in one call."""
_LOAD = (429, 503)
"""Statuses of a line that failed for lack of capacity."""
_LATER = (*_LOAD, 500, 504)
"""Statuses after which a line is retried."""
_BATCH_SALT = b"hadal-batch-1"


class BatchStops:
    """Stopped batches: they start no more lines, and a line that waits for capacity gives up."""

    def __init__(self) -> None:
        self._stopped: set[str] = set()
        self.waits: dict[str, asyncio.Timeout] = {}
        """Batch id -> timeout that ends its line's wait for capacity."""

    def __contains__(self, batch_id: str) -> bool:
        return batch_id in self._stopped

    def stop(self, batch_id: str) -> None:
        """Start no more lines of a batch, and end the wait of its line for capacity."""
        self._stopped.add(batch_id)
        if wait := self.waits.pop(batch_id, None):
            wait.reschedule(0.0)

    def ended(self, batch_id: str) -> None:
        """Forget a batch that no task processes any more."""
        self._stopped.discard(batch_id)

    @asynccontextmanager
    async def until_stopped(self, batch_id: str) -> AsyncIterator[None]:
        """Cancel the awaits inside this context as soon as the batch is stopped."""
        wait = self.waits[batch_id] = asyncio.timeout(None)
        try:
            async with wait:
                yield
        except TimeoutError:
            if not wait.expired():
                raise
        finally:
            self.waits.pop(batch_id, None)


class BatchWorker:
    """Worker that reads, answers and ends all tenants' batches, in the event loop's thread."""

    def __init__(self, gateway: Gateway, store: BatchStore, config: BatchesConfig) -> None:
        self.store, self.config, self._gateway = store, config, gateway
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._dialects = {
            each.paths[0]: each for each in dialects_of(gateway) if each.paths[0] in BATCH_ENDPOINTS
        }
        """Endpoint that a batch names -> its dialect."""
        self._turn = asyncio.Lock()
        """Lock of the line that waits for capacity; other lines queue for it in order."""
        self._slots = asyncio.Semaphore(config.max_running)
        self._drivers: dict[str, asyncio.Task[None]] = {}
        """Batch id -> task that processes it."""
        self._stops = BatchStops()
        self._missing_s: dict[str, float] = {}
        """Tenant of a batch -> time since which it has no key."""
        self._charges = BatchCharges(gateway, store, self.call)
        self.woken = asyncio.Event()
        self.num_waiting = self.num_running = 0
        self.outcomes: Counter[str] = Counter({"completed": 0, "failed": 0, "again": 0})

    async def call(self, function: Callable[..., T], *given: Any) -> T:
        """Run a method of the store off the event loop. Raises BatchesDown."""
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: function(*given)
        )

    async def run(self) -> None:
        """Process batches until cancelled."""
        was_said, forgot_s = False, -_FORGET_S
        self._charges.listen()
        try:
            while True:
                self.woken.clear()
                try:
                    if self._gateway.clock.now() - forgot_s >= _FORGET_S:
                        kept_s = self.config.keep_days * WINDOW_S
                        await self.call(self.store.forget, self._unix_s() - kept_s)
                        forgot_s = self._gateway.clock.now()
                    await self._charges.settle()
                    await self._look()
                    was_said = False
                except BatchesDown as error:
                    if not was_said:
                        log.error("batches are paused: %s", error)
                    was_said = True
                except Exception:  # An internal error must not end interactive requests.
                    log.exception("batches are paused for %g s", _AGAIN_S)
                    await asyncio.sleep(_AGAIN_S)
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
            try:
                await self._charges.settle()
            except BatchesDown as error:
                log.error("the cost of batch requests is charged at the next start: %s", error)

    def close(self) -> None:
        """Close the store, after its last call and after the ledger was closed."""
        self._thread.shutdown(wait=True)
        self._charges.close()
        self.store.close()

    def _unix_s(self) -> int:
        return int(self._gateway.clock.unix_time())

    async def _look(self) -> None:
        """Read the open batches, stop cancelled, late and withdrawn ones, and start a task for each
        tenant's first batch, and for further ones to validate or end.
        """
        batches = await self.call(self.store.open_batches)
        self.num_waiting = sum(
            batch.num_total - batch.num_completed - batch.num_failed
            for batch in batches
            if batch.status == IN_PROGRESS
        )
        busy: set[str] = set()
        for batch in batches:
            if batch.status == CANCELLING or self._is_late(batch) or self._is_withdrawn(batch):
                self._stops.stop(batch.id)
            is_in_turn = (
                batch.tenant not in busy
                or batch.status == VALIDATING  # Errors in its file are reported without waiting.
                or batch.id in self._stops
            )
            busy.add(batch.tenant)
            if batch.id not in self._drivers and is_in_turn and not self._gateway.link.draining:
                task = asyncio.get_running_loop().create_task(self._drive(batch))
                self._drivers[batch.id] = task
                task.add_done_callback(partial(self._ended, batch.id))

    def _is_withdrawn(self, batch: BatchRow) -> bool:
        """Return True if the tenant's key has been missing for WITHDRAWN_S. A key being replaced is
        missing briefly; meanwhile no line of the batch starts.
        """
        if not self._gateway.tenancy.keys.is_known or self._tenant(batch.tenant) is not None:
            self._missing_s.pop(batch.tenant, None)
            return False
        now_s = self._gateway.clock.now()
        return now_s - self._missing_s.setdefault(batch.tenant, now_s) >= WITHDRAWN_S

    def _is_late(self, batch: BatchRow) -> bool:
        return self._unix_s() >= batch.expires_s

    def _tenant_of(self, batch: BatchRow) -> Tenant | None:
        """Return the tenant for the batch's next line; None: start no more lines of it here."""
        if batch.id in self._stops or self._gateway.link.draining:
            return None
        return self._tenant(batch.tenant)

    def _ended(self, batch_id: str, task: asyncio.Task[None]) -> None:
        del self._drivers[batch_id]
        self._stops.ended(batch_id)
        self.woken.set()

    async def _drive(self, batch: BatchRow) -> None:
        """Process a batch until it ends, is paused, or needs a new look at its state."""
        try:
            if batch.status == VALIDATING and batch.id not in self._stops:
                await self._validate(batch)
                return
            tenant = self._tenant(batch.tenant)
            if batch.status == IN_PROGRESS and tenant is not None and not self._is_late(batch):
                if not await self._answer_all(batch):
                    return  # The next look decides with the batch's new state.
            elif self._is_withdrawn(batch):
                log.warning(
                    "%s is cancelled: tenant %s no longer has a key", batch.id, batch.tenant
                )
                await self.call(self.store.cancel, batch.tenant, batch.id, self._unix_s())
            elif tenant is None:
                await asyncio.sleep(_LOOK_S)
                return
            await self._end(batch)
        except BatchesDown as error:
            log.error("%s is paused: %s", batch.id, error)
            await asyncio.sleep(_AGAIN_S)
        except Exception:
            log.exception("%s is paused", batch.id)
            await asyncio.sleep(_AGAIN_S)

    async def _end(self, batch: BatchRow) -> None:
        now = await self.call(self.store.batch, batch.tenant, batch.id)
        if now is None:
            return
        is_whole = now.status == IN_PROGRESS and now.num_completed + now.num_failed == now.num_total
        if now.status == CANCELLING:
            status = CANCELLED
        elif self._is_late(now) and now.status in (VALIDATING, IN_PROGRESS) and not is_whole:
            status = EXPIRED
        else:
            status = COMPLETED
        if status == COMPLETED:
            await self.call(self.store.finalize, now, self._unix_s())
        ids = (f"file-{uuid.uuid4().hex}", f"file-{uuid.uuid4().hex}")
        expired = b""
        if status == EXPIRED:
            said = "This request was not started before its batch's completion window ended."
            expired = b'"response":null,"error":' + msgspec.json.encode(
                {"code": "batch_expired", "message": said}
            )
        ended = await self.call(self.store.end, now, status, self._unix_s(), ids, expired)
        if ended is not None:
            num = f"{ended.num_completed} of {ended.num_total} requests answered"
            log.info("%s of tenant %s is %s: %s", batch.id, batch.tenant, status, num)

    async def _validate(self, batch: BatchRow) -> None:
        lines, errors = await self.call(self._read, batch)
        if errors:
            await self.call(self.store.fail, batch, errors, self._unix_s())
        else:
            await self.call(self.store.begin, batch, lines, self._unix_s())

    def _read(self, batch: BatchRow) -> tuple[list[BatchLine], list[dict[str, Any]]]:
        if self.store.file(batch.tenant, batch.input_file_id) is None:
            said = f"The input file {batch.input_file_id!r} was deleted before it was read."
            return [], [line_error("file_not_found", said, "input_file_id", None)]
        limits = self._gateway.service.limits
        pieces = self.store.contents(batch.input_file_id)
        return read_lines(pieces, batch.endpoint, self.config.max_lines, limits.max_body_bytes)

    def _tenant(self, name: str) -> Tenant | None:
        """Return the tenant with its current settings; None: no key, or keys are not known yet."""
        keys = self._gateway.tenancy.keys
        if keys.is_open:
            return keys.check(None) if name == EVERYONE else None
        return next((tenant for tenant in keys.tenants if tenant.name == name), None)

    async def _answer_all(self, batch: BatchRow) -> bool:
        """Answer all lines. Return False if lines may remain: the batch is stopped, the
        server drains, or the tenant has no key.
        """
        tries: Counter[int] = Counter()
        while batch.id not in self._stops:
            after, begun = -1, 0
            async with asyncio.TaskGroup() as tasks:
                while lines := await self._until_up(
                    batch, partial(self.store.waiting, batch.id, after, _AHEAD)
                ):
                    for line in lines:
                        tenant = self._tenant_of(batch)
                        if tenant is None:
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
        """Parse a line, wait for capacity, and run it as one of `tasks`."""
        request_id = f"{self._dialects[batch.endpoint].id_prefix}{uuid.uuid4().hex}"
        reply = None
        try:
            work = await self._prepared(batch, line, tenant, request_id)
            async with self._stops.until_stopped(batch.id):
                reply = await self._submit(batch, work, request_id)
        except Exception as error:
            await self._refuse(batch, line, request_id, _api_error(error), tries)
            return
        if reply is not None:
            tasks.create_task(self._run(batch, line, tenant, reply, request_id, tries))

    async def _prepared(
        self, batch: BatchRow, line: BatchLine, tenant: Tenant, request_id: str
    ) -> Work:
        name = batch_of(tenant.name)
        salt = (
            tenant.salt or blake2b(tenant.name.encode(), digest_size=32, key=_BATCH_SALT).digest()
        )  # For a hashed key: its own salt is unknown until a client sends the key.
        asking = replace(tenant, given_name=name, salt=salt)
        work: Work = await self._dialects[batch.endpoint].parse(line.body, request_id, asking)
        if work.ask.stream:
            raise ApiError(400, "stream is not supported in a batch; leave it out.", param="stream")
        return work

    async def _submit(self, batch: BatchRow, work: Work, request_id: str) -> Reply | None:
        """Begin a line once there is spare capacity and the quota admits it. Its reply occupies a
        slot until `_run` releases it. Return None if the batch may start no more lines. Raises
        ApiError for errors that waiting cannot fix.
        """
        formatter = self._dialects[batch.endpoint].format(work)
        while self._tenant_of(batch) is not None:
            async with self._turn:
                await self._slots.acquire()
                reply = None
                try:
                    found = await self._until_spare(batch, work)
                    if isinstance(found, Ticket):
                        # Nothing was awaited since the front issued the ticket.
                        times = Times(self._gateway.clock.now())
                        reply = self._gateway.desk.begin(
                            work, formatter, found, request_id, times, is_batch=True
                        )
                        return reply
                finally:
                    if reply is None:
                        self._slots.release()
            # A line that waits for its tenant's quota occupies neither `_turn` nor a slot.
            if found is not None:
                wait_s = float(found.headers.get("Retry-After", 1))
                await asyncio.sleep(min(wait_s, _LOOK_S))
        return None

    async def _until_spare(self, batch: BatchRow, work: Work) -> Ticket | ApiError | None:
        """Wait for spare (off-peak) capacity. Return the line's ticket, or a refusal after which to
        try again later (quota, shutdown); None if the batch may start no more lines. Raises
        ApiError if the line can never be admitted.
        """
        while (tenant := self._tenant_of(batch)) is not None:
            try:
                return self._gateway.desk.reserve(work, tenant, is_batch=True)
            except ApiError as refusal:
                if refusal.code == NEVER_CODE:
                    raise
                if refusal.code != NO_SPARE:
                    return refusal
            await asyncio.sleep(BATCH_RETRY_S)
        return None

    async def _run(
        self,
        batch: BatchRow,
        line: BatchLine,
        tenant: Tenant,
        reply: Reply,
        request_id: str,
        tries: Counter[int],
    ) -> None:
        """Receive a line's tokens, then record its answer and its cost."""
        body, facts, end = bytearray(), list[RequestFact](), "500"
        refusal: ApiError | None = None

        async def send(message: Message) -> None:
            body.extend(message.get("body", b""))

        self.num_running += 1
        try:
            try:
                end = str(await reply.send_whole(send))
            except Exception as error:
                refusal = _api_error(error)
                end = str(refusal.status)
            finally:
                try:
                    # `end` returns the facts within the call, as the front is in this process.
                    self._gateway.desk.end(reply, tenant, end, facts.extend)
                except Exception as error:
                    refusal = _api_error(error)
            if refusal is None:
                await self._write(batch, line, request_id, 200, bytes(body), facts)
            else:
                await self._refuse(batch, line, request_id, refusal, tries, facts)
        except BatchesDown:
            self._charges.waive(facts)  # If the answer was stored after all, `settle` charges it.
            raise
        finally:
            self.num_running -= 1
            self._slots.release()

    async def _write(
        self,
        batch: BatchRow,
        line: BatchLine,
        request_id: str,
        status: int,
        body: bytes,
        facts: Sequence[RequestFact],
    ) -> None:
        head = f'"response":{{"status_code":{status},"request_id":"{request_id}","body":'
        answer = head.encode() + body + b'},"error":null'
        is_error = status != 200
        write = partial(self.store.answer, is_error=is_error, facts=facts)
        is_new = await self._until_up(batch, partial(write, batch.id, line.number, answer))
        self.outcomes["failed" if is_error else "completed"] += is_new

    async def _until_up(self, batch: BatchRow, function: Callable[[], T]) -> T:
        """Call the store; retry while it is down. Raises BatchesDown if the batch has expired."""
        while True:
            try:
                return await self.call(function)
            except BatchesDown as error:
                if self._is_late(batch):
                    raise
                log.error("%s is paused: %s", batch.id, error)
                await asyncio.sleep(_AGAIN_S)

    async def _refuse(
        self,
        batch: BatchRow,
        line: BatchLine,
        request_id: str,
        error: ApiError,
        tries: Counter[int],
        facts: Sequence[RequestFact] = (),
    ) -> None:
        """Record a line's error as its answer, or leave it for a retry (_LATER, MAX_TRIES)."""
        tries[line.number] += error.status not in _LOAD
        if error.status in _LATER and error.code != NEVER_CODE and tries[line.number] < MAX_TRIES:
            self.outcomes["again"] += 1
            self._charges.waive(facts)
            await asyncio.sleep(_LOOK_S)
        else:
            await self._write(batch, line, request_id, error.status, error.body, facts)


def _api_error(error: Exception) -> ApiError:
    """Return the error to record for a line. An internal error fails that line, not its batch."""
    if not isinstance(error, HadalError):
        log.error("a request of a batch failed", exc_info=error)
        return internal_error()
    return as_api_error(error)
