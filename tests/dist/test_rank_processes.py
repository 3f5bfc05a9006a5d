"""Units of many ranks as processes: ranks and leaders die or freeze while answers stream, no answer
changes, and the unit recovers.

All tests share one server, so each must leave it whole. `HADAL_LEVEL=all`: 30 rounds of each
leader, 50 kills and 20 stops of ranks.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from contextlib import suppress

import httpx
import pytest

from tests.dist.answers import complete, under_way
from tests.dist.oracle import complete_all, differences, everyday_cases
from tests.dist.serving import FORMED, RANKED, Server, StartServer, kill_at_work, metric, noticed_in
from tests.fresh import fresh
from tests.levels import FULL, MORE
from tests.processes import is_alive
from tests.waiting import DEADLINE_S, wait_until

NUM_ROUNDS = 30 if FULL else 2 if MORE else 1
NUM_KILLS, NUM_STOPS = (50, 20) if FULL else (3, 1)
NUM_TOKENS = 300 if FULL else 100 if MORE else 50
"""Tokens of an answer during which a process is struck."""
FEW_TOKENS = 20
"""Enough tokens to reveal changed KV or experts."""
RANKS = {
    "prefill-0": [f"prefill-0.{rank}" for rank in range(2)],
    "decode-0": [f"decode-0.{rank}" for rank in range(4)],
}
WHOLE = {unit: float(len(names)) for unit, names in RANKS.items()}
OTHERS = pytest.mark.more(
    "a rank and a leader that die, and a rank that freezes, stay in `make test`"
)


@pytest.fixture
def struck(mortal: StartServer) -> Server:
    """A server for tests that kill or freeze its ranks and leaders."""
    # Requests may not move between ranks: one that moves when a leader dies is recomputed.
    return mortal(**RANKED | {"decode": RANKED["decode"] | {"request_balance": "no_moves"}})


def by_unit(server: Server, name: str) -> dict[str, float]:
    """Return unit -> value of a metric."""
    return {unit: metric(server, name, f'unit="{unit}"') for unit in RANKS}


def formations(log: str, unit: str) -> list[set[int]]:
    """Return the ranks of each formation of a unit, oldest first."""
    return [
        {int(rank) for rank in ranks.split(",")}
        for of, _, _, ranks in FORMED.findall(log)
        if of == unit
    ]


def ranks_of(server: Server, unit: str) -> dict[str, int]:
    return {name: server.pids()[name] for name in RANKS[unit]}


def is_whole(server: Server) -> bool:
    return by_unit(server, "hadal_unit_ranks") == WHOLE


def is_clean(server: Server) -> bool:
    """Return whether all ledgers add up, and every rank's pool exists and no other."""
    audit = httpx.get(f"{server.url}/audit", timeout=DEADLINE_S)
    return audit.status_code == 200 and len(server.shared_pools()) == sum(WHOLE.values())


def wait_replaced(server: Server, victim: str, log_before: int) -> None:
    """Wait until all other ranks of the unit have noticed the loss, and the rank is back."""
    unit, _, rank = victim.rpartition(".")
    everybody = set(range(len(RANKS[unit])))
    noticed = {(unit, other, int(rank)) for other in everybody - {int(rank)}}
    wait_until(
        lambda: noticed_in(server.log()[log_before:]) >= noticed,
        f"all others noticed that {victim} was gone",
    )
    wait_until(
        lambda: formations(server.log()[log_before:], unit)[-1:] == [everybody],
        f"{victim} belongs to {unit} again",
    )
    wait_until(lambda: is_whole(server), "all ranks are counted")
    wait_until(lambda: is_clean(server), "nothing is held")


def kill_until(server: Server, name: str, line: str) -> int:
    """Kill a process whenever it is started, until the log has `line`. Returns the last pid."""
    log_before, pid = len(server.log()), 0

    def is_logged() -> bool:
        nonlocal pid
        if line in server.log()[log_before:]:
            return True
        if (now := server.pids()[name]) not in (0, pid):
            pid = now
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return False

    wait_until(is_logged, line)
    return pid


def test_every_rank_has_a_process_a_pool_and_a_place_in_its_unit(struck: Server) -> None:
    pids = struck.pids()
    assert set(pids) == {"gateway", *RANKS, *RANKS["prefill-0"], *RANKS["decode-0"]}
    assert len(set(pids.values())) == len(pids)
    assert is_clean(struck)
    assert is_whole(struck)
    assert by_unit(struck, "hadal_unit_formation") == dict.fromkeys(RANKS, 1.0)


@pytest.mark.promise(
    "A dead or frozen rank is detected within two seconds, its unit goes on without "
    "it, and requests get the same tokens"
)
@pytest.mark.promise("Its successor joins between two steps and takes its share back.")
@pytest.mark.parametrize(
    ("victim", "number"), [("decode-0.2", signal.SIGKILL), ("prefill-0.0", signal.SIGSTOP)]
)
@pytest.mark.slow("a rank is started again")
def test_a_rank_that_is_gone_is_replaced_and_takes_its_share_back(
    struck: Server, victim: str, number: signal.Signals
) -> None:
    text, log_before = complete(struck, NUM_TOKENS), len(struck.log())
    unit, _, rank = victim.rpartition(".")
    streams = under_way(struck, unit, NUM_TOKENS)
    old_pid = struck.kill(victim, number)
    struck.gate.open()
    assert streams.join() == [text]
    struck.wait_restarted(victim, old_pid)
    assert not is_alive(old_pid)
    wait_replaced(struck, victim, log_before)
    assert {gone for *_, gone in noticed_in(struck.log()[log_before:])} == {int(rank)}
    assert text.startswith(complete(struck, FEW_TOKENS))


@pytest.mark.promise(
    "The survivors load again the experts that have no replica left. Requests on the "
    "survivors keep their KV and are rolled back to the last delivered token."
)
@OTHERS
@pytest.mark.slow("many rounds")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("number", "num_rounds"), [(signal.SIGKILL, NUM_KILLS), (signal.SIGSTOP, NUM_STOPS)]
)
def test_no_request_shows_that_any_rank_is_gone(
    struck: Server, number: signal.Signals, num_rounds: int
) -> None:
    """Kills or freezes a random rank at a random moment while 16 answers are in progress."""
    seed = 31 if FULL else fresh().randrange(2**31)
    print(f"seed {seed}")
    rng, cases = random.Random(seed), everyday_cases(24 if FULL else 16, seed=23)
    longest = max(len(case.output) for case in cases)
    for _ in range(num_rounds):
        unit = rng.choice(sorted(RANKS))
        victim, log_before = rng.choice(RANKS[unit]), len(struck.log())
        # The longest answer cannot end within these steps.
        num_steps = 0 if unit == "prefill-0" else rng.randrange(longest // 2)

        async def strike(victim: str = victim, num_steps: int = num_steps) -> None:
            await kill_at_work(struck, victim, num_steps, number)

        rng.shuffle(cases)
        outputs = asyncio.run(
            complete_all(struck.url, struck.model, cases, concurrency=16, while_running=strike)
        )
        assert differences(cases, outputs) == [], f"{number.name} of {victim}"
        wait_replaced(struck, victim, log_before)


@pytest.mark.parametrize(
    ("leader", "number"),
    [
        ("decode-0", signal.SIGKILL),
        pytest.param("decode-0", signal.SIGSTOP, marks=OTHERS),
        pytest.param("prefill-0", signal.SIGKILL, marks=OTHERS),
        pytest.param("prefill-0", signal.SIGSTOP, marks=OTHERS),
    ],
)
def test_the_next_leader_takes_over_ranks_that_live_with_their_kv(
    struck: Server, leader: str, number: signal.Signals
) -> None:
    text, rng, ranks = complete(struck, NUM_TOKENS), fresh(), ranks_of(struck, leader)
    for _ in range(NUM_ROUNDS if number == signal.SIGKILL else 1):
        log_before, num_retries = len(struck.log()), metric(struck, "hadal_retries_total")
        streams = under_way(struck, leader, NUM_TOKENS, 3, rng.randrange(5, NUM_TOKENS // 2))
        old_pid = struck.kill(leader, number)
        struck.gate.open()
        assert streams.join() == [text] * 3
        struck.wait_restarted(leader, old_pid)
        log = struck.log()[log_before:]
        assert number == signal.SIGKILL or f"{leader} has sent no heartbeat" in log
        # On a busy machine a rank may answer its leader too late, or a leader the front.
        is_timely = (
            len(formations(log, leader)[0]) == len(ranks) and "took over its ranks" not in log
        )
        if leader == "decode-0" and is_timely:
            assert metric(struck, "hadal_retries_total") == num_retries, "their KV was lost"
    assert ranks_of(struck, leader) == ranks
    wait_until(lambda: is_clean(struck), "nothing is held")


@OTHERS
def test_ranks_that_no_leader_takes_over_are_ended_and_started_again(struck: Server) -> None:
    text, ranks = complete(struck, FEW_TOKENS), ranks_of(struck, "decode-0")
    kill_until(struck, "decode-0", "decode-0.0 ends, because its leader ended")
    for name, old_pid in ranks.items():
        struck.wait_restarted(name, old_pid)
    assert complete(struck, FEW_TOKENS) == text
    wait_until(lambda: is_whole(struck), "all ranks are counted")


@pytest.mark.promise("its status is 200 as long as both roles have a living rank")
@OTHERS
def test_health_names_dead_ranks(struck: Server) -> None:
    def health() -> tuple[int, str, list[str]]:
        reply = httpx.get(f"{struck.url}/health", timeout=DEADLINE_S)
        return reply.status_code, reply.json()["status"], reply.json()["missing"]

    def see(names: Sequence[str], state: tuple[int, str, list[str]]) -> None:
        """Kill these ranks whenever they are started, until /health shows the state."""
        killed = set[int]()

        def is_seen() -> bool:
            for pid in {struck.pids()[name] for name in names} - killed - {0}:
                killed.add(pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return health() == state

        wait_until(is_seen, f"{state} is said")

    whole = (200, "ready", [])
    wait_until(lambda: health() == whole, "nothing is missing")
    see(["decode-0.2"], (200, "degraded", ["decode-0.2"]))
    wait_until(lambda: health() == whole, "it is back")
    see(RANKS["decode-0"], (503, "degraded", RANKS["decode-0"]))
    wait_until(lambda: health() == whole, "all are back")


@pytest.mark.promise(
    "A rank that dies at every start is tried again later, as long as its unit works without it."
)
@OTHERS
@pytest.mark.slow("a rank that cannot start rests for 15 s")
def test_a_rank_that_cannot_start_is_put_off_while_the_others_serve(struck: Server) -> None:
    text = complete(struck, FEW_TOKENS)
    last_pid = kill_until(struck, "decode-0.2", "the others go on without it; it is started again")
    assert complete(struck, FEW_TOKENS) == text
    wait_until(lambda: by_unit(struck, "hadal_unit_ranks")["decode-0"] == 3.0, "it is missed")
    struck.wait_restarted("decode-0.2", last_pid)
    wait_until(lambda: is_whole(struck), "it is back")
