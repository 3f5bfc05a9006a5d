"""Test KV pools in shared memory: a pull copies the leased bytes, or returns an error."""

import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

import hadal.runtime.transfer.pool as kv_pool
from hadal.core.errors import ConfigError
from hadal.core.messages.units import KvLease
from hadal.runtime.transfer.kv import KvWire
from hadal.runtime.transfer.pool import (
    SHM_FOLDER,
    KvPool,
    PoolError,
    Shape,
    pool_name,
    remove_shared_memory,
    remove_stale_shared_memory,
)

RUN = f"test{os.getpid()}"
SHAPE: Shape = (9, 2, 64, 10)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    remove_shared_memory(RUN)


def make(unit: str, epoch: str = "1", shape: Shape = SHAPE, dtype: str = "float32") -> KvPool:
    pool = KvPool.create(pool_name(RUN, unit, epoch), shape, dtype)
    blocks = np.frombuffer(pool.cache, dtype=np.uint8)
    blocks[:] = np.random.default_rng(hash((unit, epoch)) % 1000).integers(0, 256, blocks.size)
    return pool


def block(pool: KvPool, index: int) -> bytes:
    return bytes(pool.cache[index * pool.block_bytes : (index + 1) * pool.block_bytes])


def lease(pool: KvPool, *ids: int) -> KvLease:
    return KvLease(pool.name, ids, tuple(int(pool.versions[i]) for i in ids), 64 * len(ids))


@pytest.mark.promise(
    "no process writes into another's pool, so no late data can land in a block with a new owner"
)
def test_a_pull_copies_the_leased_blocks_and_no_others() -> None:
    source, own = make("prefill-0"), make("decode-0")
    before = [block(own, i) for i in range(9)]
    ids, into = (3, 4, 8, 0, 2), (5, 6, 7, 2, 0)
    assert KvWire(own).pull(lease(source, *ids), into) is None
    for theirs, ours in zip(ids, into, strict=True):
        assert block(own, ours) == block(source, theirs)
    for untouched in {1, 3, 4, 8}:
        assert block(own, untouched) == before[untouched]


def test_a_block_freed_during_the_pull_voids_it(monkeypatch: pytest.MonkeyPatch) -> None:
    source, own = make("prefill-0"), make("decode-0")
    promised = lease(source, 3, 4)
    copyto = np.copyto

    def copy_slowly(target: object, values: object) -> None:
        copyto(target, values)  # type: ignore[arg-type]
        source.free((3,))

    monkeypatch.setattr(kv_pool.np, "copyto", copy_slowly)
    assert "freed during" in (KvWire(own).pull(promised, (1, 2)) or "")


def test_freeing_a_block_twice_in_one_go_counts_twice() -> None:
    pool = make("prefill-0")
    pool.free((2, 2, 5))
    assert pool.versions.tolist() == [0, 0, 2, 0, 0, 1, 0, 0, 0]


def test_a_pool_that_is_not_there_fails_the_pull() -> None:
    own = make("decode-0")
    assert "cannot be opened" in (
        KvWire(own).pull(KvLease(pool_name(RUN, "x", "1"), (1,), (0,), 64), (1,)) or ""
    )


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "hadal-../x", "other"])
def test_a_lease_cannot_name_anything_but_a_pool(name: str) -> None:
    with pytest.raises(PoolError):
        KvPool.open(name)


@pytest.mark.parametrize(
    ("at", "value"), [(0, b"NOTAPOOL"), (16, b"\xff" * 8), (24, b"float64\0"), (40, b"\xff" * 3)]
)
def test_a_damaged_header_fails_the_pull(at: int, value: bytes) -> None:
    source, own = make("prefill-0"), make("decode-0")
    promised = lease(source, 1)
    with (SHM_FOLDER / source.name).open("r+b") as file:
        file.seek(at)
        file.write(value)
    assert source.name in (KvWire(own).pull(promised, (1,)) or "")


def test_a_cut_off_segment_fails_the_pull() -> None:
    own, name = make("decode-0"), pool_name(RUN, "prefill-0", "1")
    (SHM_FOLDER / name).write_bytes(b"HADAL")
    assert "too short" in (KvWire(own).pull(KvLease(name, (1,), (0,), 64), (1,)) or "")


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((9, 3, 64, 10), "float32"), ((9, 2, 64, 9), "float32"), (SHAPE, "float16")],
)
def test_pools_of_other_models_do_not_mix(shape: Shape, dtype: str) -> None:
    source, own = make("prefill-0", shape=shape, dtype=dtype), make("decode-0")
    assert "holds blocks of" in (KvWire(own).pull(lease(source, 1), (1,)) or "")


@pytest.mark.parametrize(
    ("ids", "versions", "into"),
    [
        ((1, 2), (0, 0), (1,)),
        ((1,), (0, 0), (1,)),
        ((9,), (0,), (1,)),
        ((-1,), (0,), (1,)),
        ((1,), (0,), (9,)),
        ((1,), (0,), (-1,)),
    ],
)
def test_a_lease_that_does_not_fit_is_refused(
    ids: tuple[int, ...], versions: tuple[int, ...], into: tuple[int, ...]
) -> None:
    source, own = make("prefill-0"), make("decode-0")
    before = bytes(own.cache)
    assert KvWire(own).pull(KvLease(source.name, ids, versions, 64), into) is not None
    assert bytes(own.cache) == before


def test_a_restarted_source_takes_its_predecessors_place() -> None:
    wire = KvWire(make("decode-0"))
    for epoch in ("1", "2", "3"):
        source = make("prefill-0", epoch)
        assert wire.pull(lease(source, 1), (1,)) is None
        source.close()
    assert list(wire._sources) == [f"hadal-{RUN}.prefill-0"]


def test_the_owner_takes_the_segment_along_and_a_puller_does_not() -> None:
    source = make("prefill-0")
    KvPool.open(source.name).close()
    assert (SHM_FOLDER / source.name).exists()
    source.close()
    source.close()
    assert not (SHM_FOLDER / source.name).exists()


def test_no_room_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="kv_memory_mb"):
        KvPool.create(pool_name(RUN, "prefill-0", "1"), (1 << 30, 2, 64, 10))
    assert not (SHM_FOLDER / pool_name(RUN, "prefill-0", "1")).exists()


def test_what_dead_owners_left_is_removed_and_what_lives_is_not() -> None:
    living = make("prefill-0")
    code = (
        "import os; from hadal.runtime.transfer.pool import *; from hadal.runtime.transfer.kv import KvWire\n"
        f"KvPool.create(pool_name({RUN!r}, 'dead', '1'), {SHAPE}); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code], timeout=180, check=False, env=_environment())
    dead = pool_name(RUN, "dead", "1")
    assert (SHM_FOLDER / dead).exists()
    removed = remove_stale_shared_memory()
    assert dead in removed
    assert living.name not in removed
    assert not (SHM_FOLDER / dead).exists()


def test_segments_of_one_unit_are_removed() -> None:
    names = [
        make(unit, epoch).name
        for unit, epoch in (("decode-1", "1"), ("decode-1", "2"), ("decode-10", "1"))
    ]
    assert sorted(remove_shared_memory(RUN, "decode-1")) == names[:2]
    assert (SHM_FOLDER / names[2]).exists()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
