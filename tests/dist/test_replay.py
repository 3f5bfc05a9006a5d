"""A live server's run under load is recorded and replayed by the simulator: the same decisions in
the same order.

`HADAL_LEVEL=all`: more requests.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from evals.run import held_out_examples
from hadal.cli import app
from hadal.commands.replay import make_role
from hadal.lab.sim.replay import ReplayReport, replay
from hadal.roles.recording import Recording
from hadal.runtime.recorder import RECORD, read_recordings
from tests.dist.serving import Server, StartServer, kill_at_work
from tests.dist.test_load import load
from tests.fresh import fresh
from tests.levels import FULL
from tests.waiting import join

NUM_REQUESTS, NUM_AFTER = (1000, 40) if FULL else (30, 10)
CONCURRENCY = 32


def run_load(server: Server, num_requests: int) -> None:
    """Run the engine's load test: chats of several lengths, some streamed; every tenth client
    disconnects early.
    """
    seed = fresh().randrange(2**31)
    print(f"seed {seed}")
    examples = held_out_examples(8, seed=5)
    rng = random.Random(seed)
    ends = asyncio.run(load(server, [], examples, num_requests, rng, concurrency=CONCURRENCY))
    assert set(ends) == {"done", "left"}, set(ends)


def check(recordings: list[Recording]) -> ReplayReport:
    report = replay(recordings, make_role)
    assert report.difference is None, str(report.difference)
    assert report.num_calls == report.num_recorded
    print(
        f"{report.num_decisions:,} decisions in {report.num_calls:,} calls of"
        f" {report.num_processes} roles"
    )
    return report


@pytest.mark.slow("a run is recorded and decided again")
def test_the_same_decisions_in_the_same_order(start_server: StartServer, folder: Path) -> None:
    server = start_server(environment={RECORD: str(folder)})
    run_load(server, NUM_REQUESTS)
    server.stop()
    report = check(read_recordings(folder))
    assert report.num_processes == 3
    assert report.events["Submit"] == NUM_REQUESTS
    assert report.decisions["Prefill"] >= NUM_REQUESTS
    assert report.decisions["Execute"] > 0  # One per plan; a plan may have several passes.
    assert report.decisions["Deliver"] > NUM_REQUESTS
    done = CliRunner().invoke(app, ["replay", str(folder), "--json"])
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["decisions"] == dict(report.decisions)


@pytest.mark.more("a recording without deaths is replayed in `make test`")
@pytest.mark.slow("three runs are recorded, and decided again")
def test_also_where_processes_died(start_server: StartServer, folder: Path) -> None:
    """A unit, a rank and a leader are killed under load. Each successor is a new role under the
    same name, and a leader takes its ranks over. KV goes to disk as well, and is read back.
    """
    cache = {"folder": str(folder / "kv"), "disk_mb": 64}
    server = start_server(
        environment={RECORD: str(folder / "rec")}, cache=cache, decode={"ranks": 2}
    )
    for victim, num_steps in (("prefill-0", 3), ("decode-0.1", 20), ("decode-0", 20)):
        old_pid = server.pids()[victim]
        killing = threading.Thread(
            target=asyncio.run, args=(kill_at_work(server, victim, num_steps),)
        )
        killing.start()
        run_load(server, NUM_REQUESTS)
        join(killing)
        server.wait_restarted(victim, old_pid)
    run_load(server, NUM_AFTER)
    server.stop()
    report = check(read_recordings(folder / "rec"))
    assert report.num_processes >= 1 + 2 + 2 + 3  # The gateway, units, leaders, ranks.
    # The supervisor reported the deaths.
    assert all(report.events[name] for name in ("UnitDown", "LeaderDown"))
    assert report.decisions["Resume"] >= 1
    assert report.decisions["StoreBlocks"] > 0
