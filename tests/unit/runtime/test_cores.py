"""Test which cores of its host a rank's threads use."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from hadal.core.config import Deployment
from hadal.runtime import cores
from hadal.runtime.cores import allowed_cores, cores_of


def deployment(threads: int, ranks: int = 1) -> Deployment:
    plain = Deployment(device="cpu")
    prefill = msgspec.structs.replace(plain.prefill, threads=threads)
    decode = msgspec.structs.replace(
        plain.decode, threads=threads, ranks=ranks, ranks_per_node=ranks
    )
    return msgspec.structs.replace(plain, prefill=prefill, decode=decode)


@pytest.mark.parametrize(
    ("threads", "ranks", "process", "chosen"),
    [
        (2, 1, "prefill-0", (0, 1)),
        (2, 1, "decode-0", (2, 3)),
        (4, 1, "decode-0", (0, 1, 2, 3)),
        (3, 1, "decode-0", (3, 0, 1)),
        (2, 2, "decode-0.0", (2, 3)),
        (2, 2, "decode-0.1", (0, 1)),
        (1, 2, "decode-0.0", ()),
        (5, 1, "decode-0", ()),
        (2, 2, "decode-0", ()),
        (2, 1, "gateway", ()),
    ],
)
def test_ranks_of_a_host_take_cores_one_behind_the_other(
    threads: int, ranks: int, process: str, chosen: tuple[int, ...]
) -> None:
    assert cores_of(deployment(threads, ranks), process, (0, 1, 2, 3)) == chosen


def test_of_each_physical_core_one_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for core in (40, 41, 42, 43):
        topology = tmp_path / f"cpu{core}" / "topology"
        topology.mkdir(parents=True)
        first = 40 + core % 2
        (topology / "thread_siblings_list").write_text(f"{first},{first + 2}\n")
    monkeypatch.setattr(cores, "_CPUS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {40, 41, 42, 43})
    assert allowed_cores() == (40, 41, 42, 43)
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: {40, 42, 43})
    assert allowed_cores() == (40, 43, 42)


def test_ranks_on_a_gpu_and_those_without_kernels_take_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_gpu = msgspec.structs.replace(deployment(2), device="cuda")
    assert cores_of(on_gpu, "decode-0", (0, 1, 2, 3)) == ()
    monkeypatch.setenv("HADAL_KERNELS", "plain")
    assert cores_of(deployment(2), "decode-0", (0, 1, 2, 3)) == ()
