"""Test which pulls run at once, in which order, and which pull waits for which."""

from __future__ import annotations

import threading

import pytest

from hadal.core.messages.pools import Pull
from hadal.core.messages.units import KvLease
from hadal.core.plans import NO_LINK_BYTES, KvPulled, LinkBytes
from hadal.runtime.transfer.copier import INLINE_BYTES, NUM_THREADS, Copier
from tests.waiting import DEADLINE_S, join, wait_until

BLOCK = 1 << 20
NEAR, FAR = "near", "far"


class WeightTransfer:
    """Transfer with pulls that block until the test releases them; sources that begin with "near"
    are on this host.
    """

    def __init__(self) -> None:
        self.error: str | None = None
        self.log: list[tuple[str, int]] = []
        self.held: dict[str, threading.Event] = {}
        self.main = threading.current_thread()
        self.inline: list[int] = []
        self.under_way: list[str] = []
        self.lock = threading.Lock()

    def is_near(self, source: str) -> bool:
        return source.startswith(NEAR)

    def is_on_node(self, source: str) -> bool:
        return source.startswith(NEAR)

    def unmap_ended(self) -> None: ...

    def pull(self, lease: KvLease, into: tuple[int, ...]) -> str | None:
        with self.lock:
            assert lease.source not in self.under_way
            self.under_way.append(lease.source)
        if threading.current_thread() is self.main:
            self.inline.append(lease.num_tokens)
        event = self.held.get(lease.source)
        assert event is None or event.wait(DEADLINE_S)
        with self.lock:
            self.under_way.remove(lease.source)
            self.log.append((lease.source, lease.num_tokens))
        return self.error


def pull(request_id: str, source: str, number: int, num_blocks: int = 1) -> Pull:
    ids = tuple(range(1, num_blocks + 1))
    return Pull(request_id, 0, KvLease(source, ids, (0,) * num_blocks, number), ids)


def copier_of(wire: WeightTransfer) -> Copier:
    return Copier(wire, BLOCK, lambda: None)  # type: ignore[arg-type]


def test_small_pulls_on_this_host_are_done_at_once_and_no_others() -> None:
    wire = WeightTransfer()
    copier = copier_of(wire)
    copier.submit(pull("a", NEAR, 1))
    assert wire.inline == [1]
    assert copier.take() == [KvPulled("a", 0, None, LinkBytes(kv=(BLOCK, 0)))]
    copier.submit(pull("a", FAR, 2))
    copier.submit(pull("b", NEAR, 3, INLINE_BYTES // BLOCK + 1))
    taken: list[KvPulled] = []
    wait_until(lambda: len(taken.extend(copier.take()) or taken) == 2, "the pulls are done")  # type: ignore[func-returns-value]
    assert wire.inline == [1]
    copier.stop(DEADLINE_S)


def test_a_dead_source_holds_up_no_other() -> None:
    wire = WeightTransfer()
    wire.held = {"dead": threading.Event()}
    copier = copier_of(wire)
    for number in range(3 * NUM_THREADS):
        copier.submit(pull(f"d{number}", "dead", number))
    for number in range(6):
        copier.submit(pull(f"r{number}", f"{FAR}{number % 2}", number))
    wait_until(lambda: len(wire.log) == 6, "the pulls are done")
    assert all(source != "dead" for source, _ in wire.log)
    wire.held["dead"].set()
    wait_until(lambda: len(wire.log) == 6 + 3 * NUM_THREADS, "the pulls are done")
    assert [number for source, number in wire.log if source == "dead"] == list(
        range(3 * NUM_THREADS)
    )
    copier.stop(DEADLINE_S)


def test_a_pull_never_overtakes_an_earlier_one_of_its_request() -> None:
    wire = WeightTransfer()
    wire.held = {FAR: threading.Event()}
    copier = copier_of(wire)
    copier.submit(pull("a", FAR, 1))
    copier.submit(pull("a", f"{FAR}2", 2))
    copier.submit(pull("a", NEAR, 3))  # Small and near, but behind its request's others.
    copier.submit(pull("b", f"{FAR}2", 4))
    wait_until(lambda: wire.log == [(f"{FAR}2", 4)], "the pulls are done")
    wire.held[FAR].set()
    wait_until(lambda: len(wire.log) == 4, "the pulls are done")
    assert wire.log == [(f"{FAR}2", 4), (FAR, 1), (f"{FAR}2", 2), (NEAR, 3)]
    assert wire.inline == []
    copier.stop(DEADLINE_S)


def test_what_breaks_a_thread_is_raised() -> None:
    wire = WeightTransfer()
    copier = copier_of(wire)
    wire.under_way.append(FAR)  # Makes the wire's own assertion fail.
    copier.submit(pull("a", FAR, 1))

    def take() -> bool:
        copier.take()
        return False

    with pytest.raises(AssertionError):
        wait_until(take, "it is raised")
    copier.stop(DEADLINE_S)


def test_stopping_begins_nothing_more() -> None:
    wire = WeightTransfer()
    wire.held = {FAR: threading.Event()}
    copier = copier_of(wire)
    copier.submit(pull("a", FAR, 1))
    copier.submit(pull("b", FAR, 2))
    wait_until(lambda: wire.under_way == [FAR], "the pulls are done")

    def unmap_ended() -> None:
        wait_until(lambda: copier._worker.is_stopping, "it is stopping")
        wire.held[FAR].set()

    letting_go = threading.Thread(target=unmap_ended)
    letting_go.start()
    copier.stop(DEADLINE_S)
    join(letting_go)
    assert wire.log == [(FAR, 1)]


def test_order_holds_for_pulls_that_wait_for_their_source() -> None:
    wire = WeightTransfer()
    wire.held = {FAR: threading.Event()}
    copier = copier_of(wire)
    copier.submit(pull("other", FAR, 1))
    copier.submit(pull("a", FAR, 2))
    copier.submit(pull("a", f"{FAR}2", 3))
    copier.submit(pull("b", f"{FAR}3", 4))
    wait_until(lambda: wire.log == [(f"{FAR}3", 4)], "the pulls are done")
    wire.held[FAR].set()
    wait_until(lambda: len(wire.log) == 4, "the pulls are done")
    assert wire.log[1:] == [(FAR, 1), (FAR, 2), (f"{FAR}2", 3)]
    copier.stop(DEADLINE_S)


def test_what_was_copied_is_counted_by_node() -> None:
    wire = WeightTransfer()
    copier = copier_of(wire)
    copier.submit(pull("a", NEAR, 1))
    (near,) = copier.take()
    wire.error = "gone"
    copier.submit(pull("b", NEAR, 2))
    (failed,) = copier.take()
    wire.error = None
    copier.submit(pull("c", FAR, 3, 2))
    taken: list[KvPulled] = []
    wait_until(lambda: bool(taken.extend(copier.take()) or taken), "the pulls are done")  # type: ignore[func-returns-value]
    assert near.link_bytes == LinkBytes(kv=(BLOCK, 0))
    assert (failed.error, failed.link_bytes) == ("gone", NO_LINK_BYTES)
    assert taken[0].link_bytes == LinkBytes(kv=(0, 2 * BLOCK))
    copier.stop(DEADLINE_S)
