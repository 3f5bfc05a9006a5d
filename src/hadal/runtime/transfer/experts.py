"""Weights of experts from one rank's memory to another's, over TCP: every rank serves what it holds
to whoever asks.

    both prove themselves (runtime/transfer/peers)
    asks     layer, expert
    answers  held? | dtype, both shapes, CRC-32 | bytes of gate_up | bytes of down

The weights of (layer, expert) are constants of the model. Any holder's bytes are right, whatever
formation it or the asker belongs to, so neither side knows formations, placements or plans. A
port that was used again by another deployment's rank answers nobody here.

One connection an expert: nothing is kept warm, and a failure leaves nothing behind. The asker says
how many bytes it takes, so no answer is too big; it fills its tensors in place and trusts them once
the sum is right. Device memory goes over the host's.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hadal.comm.mesh.link import Refusals
from hadal.core.errors import HadalError
from hadal.core.handshake import TAG_BYTES, Seal
from hadal.core.plans import Source, Staged, StagePlan
from hadal.model.experts import Fetch, Overtaken
from hadal.runtime.background import SHARE, Pace, lower_priority
from hadal.runtime.transfer.peers import (
    CHALLENGE_BYTES,
    CLAIM_BYTES,
    MAX_UNPROVEN,
    NotProven,
    accepting,
    claimed,
    open_channel,
)

# The thread that gets layers ready for a flip: StagePlans in, Staged out, in order, beside the
# steps that run.
#
#     host thread     submit(plan) ........................ take() -> Staged
#     stage thread              fetch rest fetch rest ... |
#
# It is slow on purpose (runtime/background): nobody waits for a better placement, everybody waits
# for a late step. Knows neither weights nor placements; the store (model/experts) builds the layer,
# this hands it a way to fetch experts.


MAX_WAITING = 8
"""A leader installs one layer at a time, so this many wait only if it gave the ones before up."""
_WAIT_S = 1.0

Stage = Callable[[StagePlan, Fetch, Callable[[], None]], Staged]
"""(plan, fetch, rest) -> what came of it; see model/experts.ExpertStore.stage."""


class WeightTransfer(Protocol):
    """What a stager needs of runtime/transfer/experts."""

    def fetch(
        self, layer: int, source: Source, gate_up: Tensor, down: Tensor, rest: Callable[[], None]
    ) -> bool: ...

    def close(self, timeout_s: float) -> bool: ...


class Stager:
    """Runs StagePlans one at a time. All methods are called from the host's thread.

    Every plan is answered, except those that a newer formation voids.
    """

    def __init__(self, stage: Stage, transfer: WeightTransfer, wake: Callable[[], None]) -> None:
        """`transfer` is the stager's from now on. `wake` is called, from the thread, when there is
        something to take.
        """
        self._stage = stage
        self._transfer = transfer
        self._wake = wake
        self._changed = threading.Condition()
        """Guards what is below."""
        self._waiting: deque[StagePlan] = deque()
        self._formation = 0
        """Number of the newest plan, or the newest FormPlan: what belongs to an older one is void.
        """
        self._stopping = False
        self._results: deque[Staged | BaseException] = deque()
        self._pace = Pace()
        self._thread = threading.Thread(target=self._run, name="stage", daemon=True)
        self._thread.start()

    def submit(self, plan: StagePlan) -> None:
        """Queue a plan; its outcome is among `take`'s. One that waits for the same layer is
        replaced by it.
        """
        self.void(plan.formation)
        with self._changed:
            if plan.formation < self._formation:
                return
            for old in [waiting for waiting in self._waiting if waiting.layer == plan.layer]:
                self._waiting.remove(old)
                self._refuse(old, f"stage {plan.stage_id} takes its place")
            if len(self._waiting) >= MAX_WAITING:
                self._refuse(plan, f"{MAX_WAITING} layers wait already")
            else:
                self._waiting.append(plan)
                self._changed.notify_all()

    def void(self, formation: int) -> None:
        """This formation begins: drop what waits for older ones, and break off what is being
        staged for one.
        """
        with self._changed:
            if formation > self._formation:
                self._formation = formation
                self._waiting.clear()
                self._changed.notify_all()

    def take(self) -> list[Staged]:
        """Return the outcomes that are ready. Raises what broke the thread, if anything did."""
        done = []
        while self._results:
            result = self._results.popleft()
            if isinstance(result, BaseException):
                raise result
            done.append(result)
        return done

    def stop(self, timeout_s: float) -> bool:
        """Break off what is being staged, end the thread and close the transfer. False: not within
        `timeout_s` each.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return self._transfer.close(timeout_s) and not self._thread.is_alive()

    def _refuse(self, plan: StagePlan, error: str) -> None:
        self._results.append(Staged(plan.formation, plan.stage_id, plan.layer, error))
        self._wake()

    def _run(self) -> None:
        lower_priority()
        while (plan := self._next()) is not None:
            result: Staged | BaseException
            try:
                result = self._stage(plan, *self._means(plan))
            except BaseException as error:
                # A store answers with its errors; one that raises is broken, and the host ends.
                result = error
            if not self._is_void(plan):
                self._results.append(result)
                self._wake()

    def _next(self) -> StagePlan | None:
        with self._changed:
            while not self._waiting and not self._stopping:
                self._changed.wait(_WAIT_S)
            return None if self._stopping else self._waiting.popleft()

    def _is_void(self, plan: StagePlan) -> bool:
        return self._stopping or plan.formation < self._formation

    def _means(self, plan: StagePlan) -> tuple[Fetch, Callable[[], None]]:
        def rest() -> None:
            owed_s = self._pace.owed_s()
            if owed_s:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_void(plan), owed_s)
            if self._is_void(plan):
                raise Overtaken(f"stage {plan.stage_id} of formation {plan.formation}")

        def fetch(layer: int, source: Source, gate_up: Tensor, down: Tensor) -> bool:
            return self._transfer.fetch(layer, source, gate_up, down, rest)

        return fetch, rest


log = logging.getLogger(__name__)

Held = Callable[[int, int], tuple[Tensor, Tensor] | None]
"""(MoE layer, expert) -> its gate_up [2I, D] and down [D, I], None if it is not held here. From any
thread.
"""

PURPOSE = "experts 2"
"""Purpose of the key (core/handshake.key_of)."""
SILENCE_S = 1.0
"""A peer that is dead or frozen costs this long, connecting, asking or receiving."""
MIN_BYTES_PER_S = 10e6
"""A peer that trickles is given up: a transfer may take SILENCE_S and its bytes at this rate. A
disk is faster.
"""
SHUN_S = 5.0
"""Having failed once, a peer is not asked for this long: a layer's experts may all be due from
it.
"""
MAX_CONNECTIONS = 64
"""Served at once; more wait to be accepted."""
PIECE_BYTES = 1 << 20
"""Sent or received between two looks at the clock."""
_MAX_SHUNNED = 1024
_ASK = struct.Struct("<II")
_ANSWER = struct.Struct("<B16s4II")


class BadAnswer(HadalError):
    """What came is not the expert that was asked for."""


class ExpertServer:
    """Answers from a thread of its own until closed. `port` is where."""

    def __init__(self, host: str, key: bytes, held: Held, share: float = SHARE) -> None:
        """`share` of a core, at most."""
        self.refusals = Refusals("experts", "a rank's experts")
        self._key = key
        self._held = held
        self._unproven: dict[socket.socket, None] = {}
        """Who has not proven itself yet, the oldest first."""
        self._sums: dict[tuple[int, int], int] = {}
        """CRC-32 of what was sent before: constants, like the weights."""
        self._pace = Pace(share)
        self._listener = socket.create_server((host, 0), backlog=MAX_CONNECTIONS)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="experts", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Break off what is being sent and free the port. False if the thread has not ended within
        `timeout_s`.
        """
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        lower_priority()
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._listener.close()
            self._loop.close()

    async def _serve(self) -> None:
        tasks: set[asyncio.Task[None]] = set()
        accepting = asyncio.create_task(self._accept(tasks))
        accepting.add_done_callback(lambda _: self._stopping.set())
        await self._stopping.wait()
        for task in (accepting, *tasks):
            task.cancel()
        for outcome in await asyncio.gather(accepting, *tasks, return_exceptions=True):
            if isinstance(outcome, Exception):  # Being cancelled is none.
                raise outcome

    async def _accept(self, tasks: set[asyncio.Task[None]]) -> None:
        room = asyncio.Semaphore(MAX_CONNECTIONS)
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._listener)
            # Gone again, or no descriptor left. Peers that are not answered read their disk.
            except OSError as error:
                log.warning("a connection for experts was refused: %s", error)
                await asyncio.sleep(SILENCE_S)
                continue
            connection.setblocking(False)
            self._unproven[connection] = None
            if len(self._unproven) > MAX_UNPROVEN:  # Whoever only connects takes nobody's place.
                _shut(next(iter(self._unproven)))
            task = asyncio.create_task(self._talk(connection, room))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _talk(self, connection: socket.socket, room: asyncio.Semaphore) -> None:
        with connection:
            try:
                try:
                    async with asyncio.timeout(SILENCE_S):
                        seals = await self._prove(connection)
                except (
                    OSError
                ) as error:  # Silence as well: whoever takes a place and says nothing is counted.
                    self.refusals.count(str(error) or type(error).__name__)
                    return
                finally:
                    self._unproven.pop(connection)
                async with room:
                    await self._answer(connection, *seals)
            except NotProven as error:
                self.refusals.count(error)
            except OSError as error:  # A deadline's TimeoutError is one.
                log.debug("a rank that wanted an expert is gone: %r", error)
            except Exception:
                log.exception("an expert could not be sent")  # Its asker reads the checkpoint.

    async def _prove(self, connection: socket.socket) -> tuple[Seal | None, Seal | None]:
        """What tags the asker's records, and ours; None on one host."""
        handshake, answer = accepting(
            connection, self._key, await self._fill(connection, CHALLENGE_BYTES)
        )
        await self._loop.sock_sendall(connection, answer)
        claimed(handshake, await self._fill(connection, CLAIM_BYTES))
        return handshake.seal(is_outgoing=False), handshake.seal(is_outgoing=True)

    async def _answer(
        self, connection: socket.socket, asking: Seal | None, answering: Seal | None
    ) -> None:
        async with asyncio.timeout(SILENCE_S):
            asked = await self._fill(connection, _ASK.size)
            if asking is not None and asking.tag((asked,)) != await self._fill(
                connection, TAG_BYTES
            ):
                raise NotProven("what came was changed on its way")
        layer, expert = _ASK.unpack(asked)
        found = self._held(layer, expert)
        if found is None:
            head = _ANSWER.pack(0, b"", 0, 0, 0, 0, 0)
            await self._send(connection, memoryview(head), answering)
            return
        parts = [_bytes_of(_on_host(tensor)) for tensor in found]
        checksum = await self._sum(layer, expert, parts)
        head = _ANSWER.pack(1, _dtype(found[0]), *found[0].shape, *found[1].shape, checksum)
        for part in (memoryview(head), *parts):
            for piece in _pieces(part):
                await self._send(connection, piece, answering)
                await self._rest()

    async def _fill(self, connection: socket.socket, num_bytes: int) -> bytes:
        """Exactly so many bytes. Raises ConnectionResetError."""
        data = bytearray(num_bytes)
        view = memoryview(data)
        while view:
            count = await self._loop.sock_recv_into(connection, view)
            if not count:
                raise ConnectionResetError("it closed the connection")
            view = view[count:]
        return bytes(data)

    async def _send(self, connection: socket.socket, piece: memoryview, seal: Seal | None) -> None:
        async with asyncio.timeout(SILENCE_S):
            await self._loop.sock_sendall(connection, piece)
            if seal is not None:
                await self._loop.sock_sendall(connection, seal.tag((piece,)))

    async def _sum(self, layer: int, expert: int, parts: list[memoryview]) -> int:
        known = self._sums.get((layer, expert))
        if known is not None:
            return known
        checksum = 0
        for part in parts:
            for piece in _pieces(part):
                checksum = zlib.crc32(piece, checksum)
                await self._rest()
        self._sums[layer, expert] = checksum
        return checksum

    async def _rest(self) -> None:
        owed_s = self._pace.owed_s()
        if owed_s:
            await asyncio.sleep(owed_s)


class ExpertClient:
    """Fetches experts from other ranks' servers, one at a time. One thread may use it."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._shunned_until_s: dict[tuple[str, int], float] = {}

    def fetch(
        self,
        layer: int,
        source: Source,
        gate_up: Tensor,
        down: Tensor,
        rest: Callable[[], None] = lambda: None,
    ) -> bool:
        """Fill gate_up [2I, D] and down [D, I] with the expert. False: it could not be had there,
        and what the tensors hold is void. `rest` is called between pieces; what it raises is
        raised.
        """
        address = (source.host, source.port)
        if not source.port or time.monotonic() < self._shunned_until_s.get(address, 0.0):
            return False
        try:
            return self._receive(address, layer, source.expert, gate_up, down, rest)
        except (OSError, BadAnswer) as error:
            log.warning(
                "expert %d of MoE layer %d did not come from %s:%d, and is read from the model's"
                " files: %s",
                source.expert,
                layer,
                *address,
                str(error) or type(error).__name__,
            )
            if len(self._shunned_until_s) >= _MAX_SHUNNED:
                self._shunned_until_s.clear()
            self._shunned_until_s[address] = time.monotonic() + SHUN_S
            return False

    def _receive(
        self,
        address: tuple[str, int],
        layer: int,
        expert: int,
        gate_up: Tensor,
        down: Tensor,
        rest: Callable[[], None],
    ) -> bool:
        num_bytes = gate_up.nbytes + down.nbytes
        deadline_s = time.monotonic() + SILENCE_S + num_bytes / MIN_BYTES_PER_S
        with closing(open_channel(*address, self._key, "", deadline_s, SILENCE_S)) as channel:
            channel.send((_ASK.pack(layer, expert),), deadline_s=deadline_s, silence_s=SILENCE_S)
            head = bytearray(_ANSWER.size)
            channel.fill(memoryview(head), deadline_s=deadline_s, silence_s=SILENCE_S)
            is_held, dtype, *shapes, wanted = _ANSWER.unpack(head)
            if not is_held:
                return False
            found = (dtype.rstrip(b"\0"), *shapes)
            asked = (_dtype(gate_up), *gate_up.shape, *down.shape)
            if found != asked:
                raise BadAnswer(f"it holds {found}, not {asked}")
            checksum = 0
            for tensor in (gate_up, down):
                is_direct = tensor.device.type == "cpu" and tensor.is_contiguous()
                host = tensor if is_direct else torch.empty(tensor.shape, dtype=tensor.dtype)
                for piece in _pieces(_bytes_of(host)):
                    channel.fill(piece, deadline_s=deadline_s, silence_s=SILENCE_S)
                    checksum = zlib.crc32(piece, checksum)
                    rest()
                if not is_direct:
                    _from_host(host, tensor)
        if checksum != wanted:
            raise BadAnswer("its bytes do not add up to their sum")
        return True


class ExpertTransfer:
    """A rank's server and its client: what its stager needs of other ranks, and they of it."""

    def __init__(self, host: str, key: bytes, held: Held) -> None:
        self._server = ExpertServer(host, key, held)
        self._client = ExpertClient(key)
        self.fetch = self._client.fetch

    @property
    def port(self) -> int:
        return self._server.port

    def close(self, timeout_s: float) -> bool:
        return self._server.close(timeout_s)


def _pieces(view: memoryview) -> Iterator[memoryview]:
    return (view[at : at + PIECE_BYTES] for at in range(0, len(view), PIECE_BYTES))


def _dtype(tensor: Tensor) -> bytes:
    return str(tensor.dtype).removeprefix("torch.").encode()


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, shared with it."""
    array: NDArray[np.uint8] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return array.data


def _on_host(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor.cpu().contiguous()
    with torch.cuda.stream(_beside(tensor.device)):
        return tensor.to("cpu").contiguous()


def _from_host(host: Tensor, into: Tensor) -> None:
    if into.device.type != "cuda":
        into.copy_(host)
        return
    stream = _beside(into.device)
    with torch.cuda.stream(stream):
        into.copy_(host)
    stream.synchronize()  # Whoever computes with it next does so on another stream.


def _beside(device: torch.device) -> torch.cuda.Stream:
    """A stream after what is queued to compute so far (it may be writing, or still read what lay
    there before), and which what is queued from now on does not wait for.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.default_stream(device))
    return stream


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        log.debug("it was gone already: %s", error)
