"""Test pulls between two processes, by each transport: the pulled bytes are the leased ones, or the
pull soon returns an error.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import socket
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from hadal.core.errors import ConfigError
from hadal.runtime.transfer import nixl, peers
from hadal.runtime.transfer.kv import OwnEnd, transfers_to
from hadal.runtime.transfer.nixl import NixlAgent
from hadal.runtime.transfer.pool import (
    SHM_FOLDER,
    KvPool,
    PoolAddress,
    PoolError,
    pool_name,
    remove_shared_memory,
)
from hadal.runtime.transfer.shared_memory import SharedMemoryTransfer
from tests.levels import MORE
from tests.needs import skip_unless
from tests.unit.runtime.kv_peers import (
    RUN,
    Peer,
    SelfGrants,
    is_written,
    lease_of,
    make_pool,
    secret_of,
    shape_of,
    wire_of,
)
from tests.waiting import DEADLINE_S, join, wait_until

NEEDS_NIXL = skip_unless(nixl.package() is not None, "no NIXL", "pip install nixl-cu13")
BY_NIXL = (NEEDS_NIXL, pytest.mark.more("another transport; one pull by it is in `make test`"))
TRANSPORTS = ["shm", "tcp", pytest.param("nixl", marks=BY_NIXL)]
OVER_NETWORK = TRANSPORTS[1:]
NUM_BLOCKS = 130
NUM_EACH = 20 if MORE else 5
"""Number of successful pulls, and of void pulls."""
SILENCE_S = 0.3
"""Silence timeout for the one frozen peer."""


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Use TCP, as between hosts: on one host UCX would read a frozen process's memory by itself.
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("UCX_LOG_LEVEL", "fatal")
    yield
    remove_shared_memory(RUN)


@pytest.fixture
def pool() -> Iterator[KvPool]:
    made = make_pool(RUN, "decode-0", NUM_BLOCKS)
    yield made
    made.close()


@pytest.mark.parametrize("handover", ["shm", "tcp", pytest.param("nixl", marks=NEEDS_NIXL)])
def test_the_bytes_arrive_and_no_others(handover: str, pool: KvPool) -> None:
    with Peer("owner", RUN, handover, "127.0.0.1", NUM_BLOCKS) as owner:
        wire = wire_of(pool, handover)
        for ids, into in (
            ((7,), (9,)),
            ((3, 4, 8, 1, 2), (5, 6, 7, 2, 1)),
            (tuple(range(1, 129)), tuple(range(128, 0, -1))),
            (tuple(range(128, 0, -1)), tuple(range(1, 129))),
            ((), ()),
        ):
            pool.cache[:] = bytes(len(pool.cache))
            assert wire.pull(lease_of(owner.address, *ids), into) is None
            assert all(
                is_written(pool, ours, theirs, 0) for theirs, ours in zip(ids, into, strict=True)
            )
            others = [i for i in range(NUM_BLOCKS) if i not in into]
            assert not pool.blocks[others].any()
        assert wire.transport_of(owner.address) == handover
        wire.close()


@pytest.mark.parametrize("handover", TRANSPORTS)
def test_freed_blocks_void_a_pull_and_others_do_not(handover: str, pool: KvPool) -> None:
    with Peer("owner", RUN, handover, "127.0.0.1", NUM_BLOCKS) as owner:
        wire = wire_of(pool, handover)
        assert owner.ask("free 70") == "freed"
        for ids in ((70,), tuple(range(1, 128))):
            assert "freed" in (wire.pull(lease_of(owner.address, *ids), ids) or "")
        assert wire.pull(lease_of(owner.address, 69, 71), (1, 2)) is None
        assert wire.pull(lease_of(owner.address, 70, versions=(1,)), (1,)) is None
        wire.close()


@pytest.mark.promise(
    "no process writes into another's pool, so no late data can land in a block with a new owner"
)
@pytest.mark.parametrize("handover", TRANSPORTS)
def test_a_block_that_is_used_anew_during_a_pull_is_never_accepted(
    handover: str, pool: KvPool
) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}")
    random = np.random.default_rng(seed)
    with Peer("owner", RUN, handover, "127.0.0.1", NUM_BLOCKS) as owner:
        segment = KvPool.open(PoolAddress.parse(owner.address).name)
        wire = wire_of(pool, handover)
        assert wire.pull(lease_of(owner.address, 1), (1,)) is None
        whole = segment.blocks[0].view(np.int64)
        assert owner.ask("churn") == "churning"
        num_good = num_void = 0

        def pull() -> bool:
            nonlocal num_good, num_void
            ids = tuple(
                int(i)
                for i in random.permutation(np.arange(1, NUM_BLOCKS))[
                    : random.choice([1, 4, 16, 100])
                ]
            )
            versions = tuple(int(whole[i]) for i in ids)
            into = ids[::-1]
            error = wire.pull(lease_of(owner.address, *ids, versions=versions), into)
            if error is None:
                num_good += 1
                for block_id, generation, at in zip(ids, versions, into, strict=True):
                    assert is_written(pool, at, block_id, generation)
            else:
                assert "freed" in error
                num_void += 1
            return num_good >= NUM_EACH and num_void >= NUM_EACH

        wait_until(pull, "pulls came and were void")
        wire.close()
        segment.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("handover", OVER_NETWORK)
def test_an_owner_that_dies_or_freezes_is_an_error_soon(
    handover: str, number: int, pool: KvPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tuple(range(1, NUM_BLOCKS))
    with Peer("owner", RUN, handover, "127.0.0.1", NUM_BLOCKS) as owner:
        wire = wire_of(pool, handover)
        assert wire.pull(lease_of(owner.address, *ids), ids) is None
        monkeypatch.setattr(peers, "SILENCE_S", SILENCE_S)
        monkeypatch.setattr(peers, "SHUN_S", DEADLINE_S)
        num_pulls = 0

        def pull() -> str | None:
            nonlocal num_pulls
            num_pulls += 1
            pool.blocks[:, ::512] = 0
            error = wire.pull(lease_of(owner.address, *ids), ids)
            assert error is not None or all(is_written(pool, i, i, 0) for i in ids)
            return error

        def strike() -> None:
            wait_until(lambda: num_pulls > 2, "some pulls came")
            owner.process.send_signal(number)

        striking = threading.Thread(target=strike)
        striking.start()  # The signal may arrive in any of many pulls.
        error = wait_until(pull, "a pull fails")
        join(striking)
        print(error)
        assert wire.pull(lease_of(owner.address, 1), (1,)) is not None, "it is not asked any more"
        # Other requests own the blocks now: late bytes of a frozen owner must not reach them.
        pool.cache[:] = bytes([7]) * len(pool.cache)
        if number == signal.SIGSTOP:
            owner.process.send_signal(signal.SIGCONT)
            wait_until(lambda: owner.ask("connections") == "0", "it has done with the connection")
        assert (pool.blocks == 7).all()
        wire.close()


@NEEDS_NIXL
@pytest.mark.more("another transport; one pull by it is in `make test`")
def test_a_frozen_owner_that_goes_on_is_pulled_from_again(
    pool: KvPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "SHUN_S", 0.0)
    ids = tuple(range(1, NUM_BLOCKS))
    with Peer("owner", RUN, "nixl", "127.0.0.1", NUM_BLOCKS) as owner:
        wire = wire_of(pool, "nixl")
        assert wire.pull(lease_of(owner.address, *ids), ids) is None
        owner.process.send_signal(signal.SIGSTOP)
        with monkeypatch.context() as impatient:
            impatient.setattr(peers, "SILENCE_S", SILENCE_S)
            assert "silent" in (wire.pull(lease_of(owner.address, *ids), ids) or "")
        owner.process.send_signal(signal.SIGCONT)
        assert wire.pull(lease_of(owner.address, *ids), ids) is None
        assert all(is_written(pool, i, i, 0) for i in ids)
        assert wire.transport_of(owner.address) == "nixl"
        wire.close()


@pytest.mark.parametrize("handover", OVER_NETWORK)
def test_a_killed_puller_leaves_nothing_at_the_owner(handover: str) -> None:
    with Peer("owner", RUN, handover, "127.0.0.1", NUM_BLOCKS) as owner:
        with Peer("puller", RUN, handover, owner.address, NUM_BLOCKS) as puller:
            assert '"' + handover + '"' in puller.address  # It printed a line: a pull is over.
            num_threads = int(owner.ask("threads"))
            assert owner.ask("connections") == "1"
            puller.process.kill()
        wait_until(lambda: owner.ask("connections") == "0", "its connection is closed")
        wait_until(lambda: int(owner.ask("threads")) == num_threads - 1, "its thread has ended")


@pytest.mark.promise(
    "shared memory if both ends can map the same file, else NIXL if both have it, else TCP"
)
def test_auto_takes_the_segment_where_it_can_and_never_one_of_another_birth(pool: KvPool) -> None:
    with Peer("owner", RUN, "auto", "127.0.0.1", NUM_BLOCKS) as owner:
        wire = wire_of(pool, "auto")
        assert wire.is_near(owner.address)
        assert wire.pull(lease_of(owner.address, 5), (6,)) is None
        assert wire.transport_of(owner.address) == "shm"
        wire.close()
        # On another host's /dev/shm a segment of the same name may exist, which is not this one.
        (SHM_FOLDER / PoolAddress.parse(owner.address).name).unlink()
        imposter = make_pool(RUN, "prefill-0", 3)
        imposter.cache[:] = bytes([1]) * len(imposter.cache)
        wire = wire_of(pool, "auto")
        assert not wire.is_near(owner.address)
        assert wire.is_on_node(owner.address), "its server is at this node's address"
        assert wire.pull(lease_of(owner.address, 5), (6,)) is None
        assert is_written(pool, 6, 5, 0)
        assert wire.transport_of(owner.address) == ("nixl" if nixl.package() else "tcp")
        wire.close()
        near = wire_of(pool, "shm")
        assert "another pool" in (near.pull(lease_of(owner.address, 5), (6,)) or "")
        imposter.close()


@pytest.mark.promise(
    "shared memory if both ends can map the same file, else NIXL if both have it, else TCP"
)
@NEEDS_NIXL
def test_auto_falls_back_to_tcp_where_one_end_has_no_nixl(
    pool: KvPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Peer("owner", RUN, "tcp", "127.0.0.1", NUM_BLOCKS) as owner:
        (SHM_FOLDER / PoolAddress.parse(owner.address).name).unlink()
        wire = wire_of(pool, "auto")
        assert wire.pull(lease_of(owner.address, 5), (6,)) is None
        assert wire.transport_of(owner.address) == "tcp"
        wire.close()
        asked = wire_of(pool, "nixl")
        assert "has no NIXL" in (asked.pull(lease_of(owner.address, 5), (6,)) or "")
        asked.close()
        monkeypatch.setattr(nixl, "_PACKAGES", ("nixl_of_no_version",))
        wire = wire_of(pool, "auto")
        assert wire.pull(lease_of(owner.address, 5), (6,)) is None
        wire.close()
        with pytest.raises(ConfigError, match="pip install"):
            wire_of(pool, "nixl")


@pytest.mark.parametrize(
    ("handover", "names", "far_names"),
    [
        ("shm", ["shm"], None),
        ("nixl", ["nixl", "tcp"], ["nixl", "tcp"]),
        ("tcp", ["tcp"], ["tcp"]),
        ("auto", ["shm"], ["nixl", "tcp"]),
    ],
)
def test_the_best_transport_that_may_be_used_comes_first(
    handover: str, names: list[str], far_names: list[str] | None, pool: KvPool
) -> None:
    """`far_names`: transports to a pool without a file on this host; None: it cannot be reached."""
    key, agent = secret_of(RUN), NixlAgent("never made")
    own = OwnEnd(
        handover,
        key,
        SelfGrants(key, pool.name),
        agent if handover in ("nixl", "auto") else None,
    )
    near = PoolAddress(pool.name, pool.birth, "127.0.0.1", 1)
    far = PoolAddress(pool_name(RUN, "prefill-0", "1"), "00" * 8, "127.0.0.1", 1)
    assert [transfer.name for transfer in transfers_to(near, own)] == names
    if far_names is None:
        with pytest.raises(PoolError):
            transfers_to(far, own)
    else:
        assert [transfer.name for transfer in transfers_to(far, own)] == far_names


@pytest.mark.parametrize("handover", OVER_NETWORK)
def test_pools_of_other_shapes_do_not_mix(handover: str) -> None:
    other = KvPool.create(pool_name(RUN, "decode-1", "1"), shape_of(9, 5))
    with Peer("owner", RUN, handover, "127.0.0.1", 9) as owner:
        wire = wire_of(other, handover)
        assert "holds blocks of" in (wire.pull(lease_of(owner.address, 1), (1,)) or "")
        assert not any(other.cache)
        wire.close()
    other.close()


@pytest.mark.parametrize("handover", OVER_NETWORK)
def test_a_lease_that_does_not_fit_is_refused(handover: str, pool: KvPool) -> None:
    before = bytes(pool.cache)
    with Peer("owner", RUN, handover, "127.0.0.1", 9) as owner:
        wire = wire_of(pool, handover)
        for ids, versions, into in (
            ((1, 2), (0, 0), (1,)),
            ((1,), (0, 0), (1,)),
            ((9,), (0,), (1,)),
            ((-1,), (0,), (1,)),
            ((1,), (0,), (NUM_BLOCKS,)),
            ((1,), (0,), (-1,)),
        ):
            assert wire.pull(lease_of(owner.address, *ids, versions=versions), into) is not None
        assert bytes(pool.cache) == before
        wire.close()


def test_an_address_where_nobody_is_fails_at_once(pool: KvPool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    wire = wire_of(pool, "tcp")
    assert wire.pull(lease_of(f"hadal-{RUN}.x.1#00@127.0.0.1:{port}", 1), (1,)) is not None
    assert wire.pull(lease_of("nonsense", 1), (1,)) is not None
    wire.close()


def test_a_restarted_owner_takes_its_predecessors_place(pool: KvPool) -> None:
    wire = wire_of(pool, "tcp")
    for _ in range(3):
        with Peer("owner", RUN, "tcp", "127.0.0.1", 9) as owner:
            assert wire.pull(lease_of(owner.address, 5), (6,)) is None
        remove_shared_memory(RUN, "prefill-0")
    assert list(wire._sources) == [f"hadal-{RUN}.prefill-0"]
    wire.close()


def test_a_pool_whose_unit_is_gone_holds_no_memory_here(pool: KvPool) -> None:
    """The next unit's pool may need the memory before the next pull."""
    wire = wire_of(pool, "shm")
    with Peer("owner", RUN, "shm", "127.0.0.1", 9) as owner:
        assert wire.pull(lease_of(owner.address, 5), (6,)) is None
        (source,) = wire._sources.values()
        (transfer,) = source.transfers
        assert isinstance(transfer, SharedMemoryTransfer)
        mapped = weakref.ref(transfer.mapped)
        del source, transfer
        wire._looked_s = -math.inf
        wire.unmap_ended()
        assert mapped() is not None, "its unit lives"
    remove_shared_memory(RUN, "prefill-0")
    gc.disable()  # The mapping must be freed without the cycle collector.
    try:
        wire._looked_s = -math.inf
        wire.unmap_ended()
        assert mapped() is None
    finally:
        gc.enable()
    wire.close()
