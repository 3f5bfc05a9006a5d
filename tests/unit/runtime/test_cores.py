"""Which cores of its host a rank's threads take, and what a process holds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from hadal.core.config import Deployment
from hadal.runtime import cores
from hadal.runtime.cores import allowed_cores, cores_held, cores_of


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


_BINDS_A_THREAD = """
import os, sys, threading
bound = threading.Barrier(2)
def bind():
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    bound.wait()
    threading.Event().wait()
threading.Thread(target=bind, daemon=True).start()
bound.wait()
print("bound", flush=True)
sys.stdin.read()
"""


def test_what_a_process_holds_is_seen_from_outside() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _BINDS_A_THREAD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"bound\n"
        here = os.sched_getaffinity(0)
        assert cores_held(process.pid) == ((max(here),) if len(here) > 1 else ())
        process.communicate(timeout=60.0)
    assert cores_held(process.pid) == ()
