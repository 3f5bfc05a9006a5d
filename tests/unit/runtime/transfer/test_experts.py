"""Test experts over the wire: the same bytes or none; peers that die, freeze, lie or send garbage
cost one silence timeout and no more.
"""

import contextlib
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
import torch

from hadal.core.handshake import key_of
from hadal.core.plans import Source
from hadal.reference.params import FP8, Matrix, MlpWeights
from hadal.runtime.transfer import peers
from hadal.runtime.transfer.experts import (
    PIECE_BYTES,
    PURPOSE,
    AskExpert,
    ExpertClient,
    ExpertHead,
    ExpertServer,
    ExpertTransfer,
)
from hadal.runtime.transfer.peers import MAX_UNPROVEN, Channel, accept_channel, open_channel
from tests.fresh import fresh
from tests.waiting import DEADLINE_S, deadline, join, wait_until

HOST = "127.0.0.1"
KEY = key_of(b"a run", PURPOSE)
TINY = (192, 32)
"""Dimensions (D, I) of a tiny expert."""


def expert_of(
    seed: int, shape: tuple[int, int] = TINY, dtype: torch.dtype = torch.float32
) -> MlpWeights:
    """Return an expert of random bits; FP8 with scales."""
    generator = torch.Generator().manual_seed(seed)
    dim, width = shape
    size = torch.empty((), dtype=dtype).element_size()

    def part(*of: int) -> Matrix:
        bits = torch.randint(0, 256, (of[0], of[1] * size), dtype=torch.uint8, generator=generator)
        scales = torch.rand(2, 3, generator=generator) if dtype is FP8 else None
        return Matrix(bits.view(dtype), scales)

    return MlpWeights(part(width, dim), part(width, dim), part(dim, width))


def empty(held: MlpWeights) -> MlpWeights:
    return held.empty_like()


def is_same(one: MlpWeights, other: MlpWeights) -> bool:
    """Return whether two experts are equal bit by bit, as some values are NaN."""
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(one.parts, other.parts, strict=True)
    )


@contextmanager
def serving(experts: dict[tuple[int, int], MlpWeights], key: bytes = KEY) -> Iterator[ExpertServer]:
    server = ExpertServer(HOST, key, lambda layer, expert: experts.get((layer, expert)))
    try:
        yield server
    finally:
        assert server.close(DEADLINE_S)


def source(port: int, expert: int = 7) -> Source:
    return Source(expert, HOST, port)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [TINY, (3, 1), (771, 512)])
def test_what_is_held_arrives_as_it_is(shape: tuple[int, int], dtype: torch.dtype) -> None:
    seed = fresh().randrange(2**31)
    print("seed", seed)
    held = expert_of(seed, shape, dtype)
    with serving({(3, 7): held}) as server:
        client = ExpertClient(KEY)
        for _ in range(2):  # The second time the checksum is known.
            got = empty(held)
            assert client.fetch(3, source(server.port), got)
            assert is_same(got, held)


def test_a_place_among_others_is_filled_and_nothing_beside_it() -> None:
    held = expert_of(1)
    stacked = [torch.zeros(3, *part.shape) for part in held.parts]
    among = MlpWeights(*(Matrix(part[1]) for part in stacked))
    apart = MlpWeights(*(Matrix(torch.zeros(part.shape[::-1]).T) for part in held.parts))
    with serving({(0, 7): held}) as server:
        client = ExpertClient(KEY)
        assert client.fetch(0, source(server.port), among)
        assert client.fetch(0, source(server.port), apart)
    assert is_same(among, held)
    assert not any(part[slot].any() for part in stacked for slot in (0, 2))
    assert is_same(apart, held)


def test_what_is_not_held_is_said_and_nobody_is_blamed() -> None:
    held = expert_of(1)
    with serving({(0, 7): held}) as server:
        client, got = ExpertClient(KEY), empty(held)
        assert not client.fetch(0, source(server.port, 8), got)
        assert not client.fetch(1, source(server.port, 7), got)
        assert client.fetch(0, source(server.port, 7), got)


def test_bytes_that_changed_are_refused() -> None:
    held = expert_of(1)
    with serving({(0, 7): held}) as server:
        assert ExpertClient(KEY).fetch(0, source(server.port), empty(held))
        held.down.values.view(torch.uint8)[5, 5] ^= (
            1  # One bit; the checksum is that of the first answer.
        )
        assert not ExpertClient(KEY).fetch(0, source(server.port), empty(held))


@pytest.mark.parametrize(
    "into",
    [expert_of(1, (96, 32)), expert_of(1, (192, 64)), expert_of(1, dtype=torch.bfloat16)],
)
def test_another_shape_or_type_is_refused(
    into: MlpWeights, caplog: pytest.LogCaptureFixture
) -> None:
    with serving({(0, 7): expert_of(1)}) as server:
        assert not ExpertClient(KEY).fetch(0, source(server.port), into)
    assert "it holds" in caplog.text


def test_another_run_is_told_nothing() -> None:
    held = expert_of(1)
    with serving({(0, 7): held}, key_of(b"another run", PURPOSE)) as server:
        assert not ExpertClient(KEY).fetch(0, source(server.port), empty(held))


def test_without_a_port_there_is_nobody_to_ask(caplog: pytest.LogCaptureFixture) -> None:
    assert not ExpertClient(KEY).fetch(0, Source(7), empty(expert_of(1)))
    assert not caplog.text


def test_one_that_failed_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    held = expert_of(1)
    with serving({(0, 7): held}) as server:
        port = server.port
    client, got = ExpertClient(KEY), empty(held)
    assert not client.fetch(0, source(port), got), "nobody listens"
    with socket.create_server((HOST, port)) as listener:
        listener.setblocking(False)
        assert not client.fetch(0, source(port), got)
        with pytest.raises(BlockingIOError):
            listener.accept()
        with serving({(0, 7): held}) as server:
            assert client.fetch(0, source(server.port), got), "others are asked"
        monkeypatch.setattr(peers.PeerLink, "is_shunned", False)  # As after a while.
        listener.setblocking(True)
        accepting = threading.Thread(target=lambda: listener.accept()[0].close())
        accepting.start()
        assert not client.fetch(0, source(port), got), "asked again, in vain"
        join(accepting)


# ---- peers that are processes ----
_PEER = f"""
import torch, sys
torch.set_num_threads(1)
from hadal.runtime.transfer import peers
from hadal.runtime.transfer.experts import ExpertServer
from hadal.reference.params import Matrix, MlpWeights
peers.SILENCE_S = {DEADLINE_S}
held = MlpWeights(*(Matrix(torch.full((2048, 2048), value)) for value in (3.0, 3.0, 4.0)))
server = ExpertServer({HOST!r}, {KEY!r}, lambda layer, expert: held)
print(server.port, flush=True)
sys.stdin.read()
"""
BIG = (2048, 2048)
"""Dimensions of a 48 MiB expert: more than the kernel buffers in flight."""


class Peer:
    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PEER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=DEADLINE_S)


@pytest.fixture(scope="module")
def processes() -> Iterator[list[Peer]]:
    """Yield a list for the one peer that tests share, as starting it takes longer than all tests here."""
    started: list[Peer] = []
    yield started
    for peer in started:
        peer.end()


@pytest.fixture
def peer(processes: list[Peer]) -> Peer:
    if processes and processes[0].process.poll() is not None:
        processes.pop().end()
    if not processes:
        processes.append(Peer())
    return processes[0]


def big() -> MlpWeights:
    return MlpWeights(*(Matrix(torch.zeros(BIG)) for _ in range(3)))


def after(pieces: int, act: Callable[[], object]) -> Callable[[], None]:
    """Return a callback for the pauses between pieces; it calls `act` once, after `pieces` pieces."""
    seen = [0]

    def rest() -> None:
        seen[0] += 1
        if seen[0] == pieces:
            act()

    return rest


@pytest.mark.parametrize("pieces", [0, 3])
def test_a_frozen_peer_costs_its_silence_once(
    peer: Peer, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, port = peer.process, peer.port
    got, client = big(), ExpertClient(KEY)
    monkeypatch.setattr(peers, "SILENCE_S", 0.3)
    monkeypatch.setattr(peers, "SHUN_S", DEADLINE_S)
    if not pieces:
        process.send_signal(signal.SIGSTOP)
    freeze = after(pieces, lambda: process.send_signal(signal.SIGSTOP))
    assert not client.fetch(0, source(port), got, freeze)
    process.send_signal(signal.SIGCONT)
    monkeypatch.setattr(peers, "SILENCE_S", DEADLINE_S)
    assert not any(client.fetch(0, source(port, expert), got) for expert in range(100)), (
        "not asked again so soon"
    )
    assert ExpertClient(KEY).fetch(0, source(port), got)


def test_a_peer_that_is_killed_in_the_middle_costs_nothing_but_the_expert(peer: Peer) -> None:
    got, client = big(), ExpertClient(KEY)
    assert client.fetch(0, source(peer.port), got)
    assert (got.up.values == 3.0).all()
    assert (got.down.values == 4.0).all()
    assert not client.fetch(0, source(peer.port), got, after(3, peer.process.kill))
    assert not client.fetch(0, source(peer.port), got)


# ---- peers of other runs, or faulty ones ----
SOUND = ExpertHead((("float32", (32, 192)), ("float32", (32, 192)), ("float32", (192, 32))), 1)


def answering(talk: Callable[[socket.socket], None]) -> int:
    """Open a port that talks like this to its first connection; return its number."""
    listener = socket.create_server((HOST, 0))

    def run() -> None:
        with listener:
            listener.settimeout(DEADLINE_S)
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(DEADLINE_S)
                try:
                    talk(connection)
                except OSError:
                    return  # The client hung up, as it should.

    threading.Thread(target=run, daemon=True).start()
    return int(listener.getsockname()[1])


def ask(port: int) -> Channel:
    """Ask for expert 7, as a rank of the run does; return the channel for the answer."""
    channel = open_channel(HOST, port, KEY, "decode-0.1", deadline())
    channel.send_frame(AskExpert(0, 7))
    return channel


def unproven(talk: Callable[[socket.socket], None]) -> Callable[[socket.socket], None]:
    """Wrap `talk` as a peer of another run, which reads the challenge as if it were a request."""

    def hear_and_talk(connection: socket.socket) -> None:
        connection.recv(4096)
        talk(connection)

    return hear_and_talk


def proven(talk: Callable[[socket.socket], None]) -> Callable[[socket.socket], None]:
    """Wrap `talk` as a peer of the run that becomes faulty after the handshake."""

    def prove_and_talk(connection: socket.socket) -> None:
        channel = accept_channel(connection, KEY)
        ask = channel.receive_frame(msgspec.msgpack.Decoder(AskExpert), deadline())
        assert ask == AskExpert(0, 7)
        connection.settimeout(DEADLINE_S)
        talk(connection)

    return prove_and_talk


def answer(connection: socket.socket, head: ExpertHead, data: bytes = b"") -> None:
    body = msgspec.msgpack.encode(head)
    connection.sendall(struct.pack("<I", len(body)) + body + data)


def babble(connection: socket.socket) -> None:
    connection.sendall(random.Random(5).randbytes(8 << 20))


def claim_to_be_huge(connection: socket.socket) -> None:
    huge = (2**31, 2**31)
    answer(connection, ExpertHead((("float32", huge),) * 3, 0), bytes(4 << 20))


def trickle(connection: socket.socket) -> None:
    answer(connection, SOUND)
    trickled = threading.Event()
    while not trickled.wait(0.01):  # Until the client hangs up.
        connection.sendall(b"x")


def send_too_little(connection: socket.socket) -> None:
    answer(connection, SOUND, bytes(1000))


def send_zeros(connection: socket.socket) -> None:
    answer(connection, SOUND, bytes(4 << 20))


def say_nothing(connection: socket.socket) -> None:
    connection.recv(1)  # Until the client hangs up.


@pytest.mark.parametrize(
    "talk",
    [
        *map(unproven, (babble, say_nothing, lambda connection: None)),
        *map(proven, (babble, claim_to_be_huge, trickle, send_too_little, send_zeros, say_nothing)),
    ],
)
def test_answers_that_are_none(
    talk: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "SILENCE_S", 0.2)
    assert not ExpertClient(KEY).fetch(0, source(answering(talk)), empty(expert_of(1)))


def test_a_server_outlives_whoever_babbles_or_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "SILENCE_S", 0.2)
    held, generator = expert_of(1), random.Random(6)
    with serving({(0, 7): held}) as server:
        address = (HOST, server.port)
        for size in (0, 1, 39, 40, 100_000):
            with socket.create_connection(address, timeout=DEADLINE_S) as connection:
                connection.sendall(generator.randbytes(size))
        ask(server.port).close()  # This peer hangs up on a long answer.
        silent = [
            socket.create_connection(address, timeout=DEADLINE_S) for _ in range(2 * MAX_UNPROVEN)
        ]
        got = empty(held)
        wait_until(
            lambda: ExpertClient(KEY).fetch(0, source(server.port), got),
            "an expert comes: they do not take all the room for ever",
        )
        assert is_same(got, held)
        for connection in silent:
            connection.close()


def test_a_holder_that_fails_is_a_failed_fetch_and_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    held = expert_of(1)

    def look(layer: int, expert: int) -> MlpWeights:
        if layer:
            raise IndexError("no such layer")
        return held

    server, got = ExpertServer(HOST, KEY, look), empty(held)
    assert not ExpertClient(KEY).fetch(9, source(server.port), got)
    assert ExpertClient(KEY).fetch(0, source(server.port), got)
    assert server.close(DEADLINE_S)
    assert "no such layer" in caplog.text


# ---- together ----
def test_many_fetches_at_once() -> None:
    experts = {(0, number): expert_of(number) for number in range(32)}
    experts |= {(1, number): expert_of(100 + number, (771, 512)) for number in range(4)}
    right: list[bool] = []

    def run(seed: int) -> None:
        client = ExpertClient(KEY)
        for layer, number in random.Random(seed).sample(sorted(experts), 20):
            held = experts[layer, number]
            got = empty(held)
            right.append(
                client.fetch(layer, source(server.port, number), got) and is_same(got, held)
            )

    with serving(experts) as server:
        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        join(*threads)
    assert right == [True] * 160


def test_whoever_fetches_may_break_it_off() -> None:
    held = expert_of(1, (771, 1024))
    assert held.up.values.nbytes > 2 * PIECE_BYTES

    def stop() -> None:
        raise KeyError("enough")

    with serving({(0, 7): held}) as server:
        client = ExpertClient(KEY)
        with pytest.raises(KeyError, match="enough"):
            client.fetch(0, source(server.port), empty(held), stop)
        assert client.fetch(0, source(server.port), empty(held))


def test_a_closed_wire_has_no_thread_and_no_port() -> None:
    """Closing does not wait for a peer that does not read."""
    held = expert_of(1, (2048, 4096))
    before = set(threading.enumerate())
    wire = ExpertTransfer(HOST, KEY, lambda layer, expert: held)
    with contextlib.closing(ask(wire.port)) as channel:
        assert channel.connection.recv(1000)  # The wire is sending.
        assert wire.close(DEADLINE_S)
    assert set(threading.enumerate()) <= before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, wire.port), timeout=DEADLINE_S)
    assert wire.close(DEADLINE_S), "closing twice is closing once"
