"""Processes that write one ledger are killed after a random number of facts. Every acknowledged fact is
in the ledger, each once, and sums are exact. Tested with SQLite and with PostgreSQL (its server is
stopped as well), with and without outages. `HADAL_LEVEL=all`: 100 rounds with SQLite, 33 with PostgreSQL.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hadal.runtime.ledger.address import ledger_url, outbox_of
from hadal.runtime.ledger.store import Store
from hadal.stats.report import MODEL
from hadal.stats.tally import Tally
from tests.dist.ledger_child import fact_of
from tests.dist.postgres import Postgres, postgres
from tests.dist.served import fork_module
from tests.levels import FULL, LEVEL
from tests.unit.runtime.ledger.test_outbox import left_in
from tests.unit.stats.facts import details_of
from tests.waiting import DEADLINE_S, join, wait_until

NUM_ROUNDS = 100 if FULL else 1 if LEVEL == "test" else 4
MORE = pytest.mark.more("a file with outages is in `make test`")
MAX_FACTS = 300
"""Maximum number of acknowledged facts before a writer is killed."""
ALWAYS = (0, 2**60)


class Child:
    """One writer. Its lines are read at once, so that it never blocks on output."""

    def __init__(
        self, url: str, seed: int, name: str, limit: int = 0, outages: float = 0.0
    ) -> None:
        arguments = [url, str(seed), name, str(limit), str(outages)]
        self.process = fork_module("tests.dist.ledger_child", arguments, os.environ)
        self.kept: set[str] = set()
        self.errors: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            if line.startswith(b"A "):
                self.kept.update(line.decode().split()[1:])
            else:
                self.errors.append(line.decode())

    def wait_for(self, num_facts: int) -> None:
        """Wait until this number of facts is acknowledged."""
        wait_until(lambda: len(self.kept) >= num_facts, f"{num_facts} facts are kept")

    def end(self, *, kill: bool) -> None:
        if kill:
            self.process.kill()
        code = self.process.wait(DEADLINE_S)
        join(self._thread)
        self.process.stdout.close()
        assert code == (-9 if kill else 0), self.errors


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a temporary state folder: writers to a database server keep their outbox there."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with postgres() as running:
        yield running


def clear(url: str) -> None:
    """Empty the ledger of a server that earlier tests used."""
    store = Store(ledger_url(url))
    store.prepare()
    with store._begin() as connection:
        for table in ("hadal_requests", "hadal_nodes", "hadal_tallies"):
            connection.exec_driver_sql(f"DELETE FROM {table}")
    store.close()


def check(url: str, kept: set[str]) -> int:
    """Assert that all acknowledged facts are there, that facts are right and unique, and that sums
    are exact. Return the number of facts.
    """
    store = Store(ledger_url(url))
    with store._begin(is_reading=True) as connection:
        there = [
            one for (one,) in connection.exec_driver_sql("SELECT request_id FROM hadal_requests")
        ]
        if url.endswith(".sqlite"):
            assert connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
    assert kept <= set(there), f"{len(kept - set(there))} facts that were kept are gone"
    assert len(there) == len(set(there))
    facts = [fact_of(one) for one in there]
    expected = Tally()
    expected.add_facts(facts)
    window = store.read(*ALWAYS, by=MODEL)
    assert window.tally == expected
    assert window.details == details_of(facts, lambda fact: fact.model)
    store.close()
    return len(there)


def kill_rounds(url: str, seed: int, outages: float, num_rounds: int) -> None:
    """Run two writers at once and kill each at its own moment, for several rounds on one ledger."""
    rng = random.Random(seed)
    kept: set[str] = set()
    for number in range(num_rounds):
        children = [Child(url, rng.randrange(10**6), f"{number}{who}", 0, outages) for who in "ab"]
        for child in children:
            child.wait_for(1)
        for child in rng.sample(children, 2):
            child.wait_for(rng.randrange(MAX_FACTS))
            child.end(kill=True)
        kept = kept.union(*(child.kept for child in children))
    # One more writer takes over the facts that killed writers left in the outbox.
    last = Child(url, 0, "last", limit=200)
    last.end(kill=False)
    kept |= last.kept
    assert check(url, kept) >= len(kept) >= 200


@pytest.mark.promise("Any number of servers may write one ledger.")
@pytest.mark.campaign("moments of kills are drawn")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("outages", [pytest.param(0.0, marks=MORE), 0.5])
def test_killed_writers_of_a_file(tmp_path: Path, outages: float) -> None:
    url = str(tmp_path / "l.sqlite")
    kill_rounds(url, 1 if outages else 2, outages, NUM_ROUNDS)
    assert not left_in(outbox_of(ledger_url(url)))
    assert not list(tmp_path.glob("*.damaged"))


@MORE
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("outages", [0.0, 0.5])
def test_killed_writers_of_a_server(server: Postgres, tmp_path: Path, outages: float) -> None:
    clear(server.url)
    kill_rounds(server.url, 3 if outages else 4, outages, max(2, NUM_ROUNDS // 3))
    assert not left_in(outbox_of(ledger_url(server.url)))


@MORE
@pytest.mark.slow("PostgreSQL is stopped and started again")
def test_a_server_that_crashes_under_its_writers(server: Postgres, tmp_path: Path) -> None:
    """Facts wait in the outbox, and reach the ledger after the restart."""
    clear(server.url)
    children = [Child(server.url, seed, f"c{seed}") for seed in range(2)]
    for child in children:
        child.wait_for(MAX_FACTS)
    server.stop()
    outbox = outbox_of(ledger_url(server.url))
    wait_until(lambda: left_in(outbox), "facts wait in the outbox")
    server.start()
    for child in children:
        child.wait_for(len(child.kept) + 100)
        child.end(kill=True)
    last = Child(server.url, 9, "last", limit=50)
    last.end(kill=False)
    check(server.url, set.union(*(child.kept for child in (*children, last))))


@pytest.mark.promise("Any number of servers may write one ledger.")
@MORE
@pytest.mark.parametrize("kind", ["file", "server"])
def test_two_processes_that_say_the_same(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Both exit normally: the ledger has every fact of each, and facts that both wrote only once."""
    url = str(tmp_path / "l.sqlite") if kind == "file" else request.getfixturevalue("server").url
    if kind == "server":
        clear(url)
    children = [Child(url, seed, f"w{seed}", limit=1500) for seed in range(2)]
    for child in children:
        child.end(kill=False)
    said = children[0].kept | children[1].kept
    assert check(url, said) == len(said)
    assert len(children[0].kept & children[1].kept) > 100, "many were said by both"
