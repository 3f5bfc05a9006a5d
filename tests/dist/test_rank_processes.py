"""Units of many ranks as processes: they start, answer, keep their books, lose a rank and take it
back, and go.
"""

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from hadal.runtime.process.child import FAILED_STARTS_MAX, PUT_OFF_S
from tests.dist.conftest import StartServer, starting
from tests.dist.serving import FORMED, RANKED, START_TIMEOUT_S, Server, is_alive, noticed_in
from tests.dist.test_supervision import stream
from tests.levels import FULL
from tests.waiting import wait_until

NUM_TOKENS = 300 if FULL else 100
"""Of an answer during which a rank is struck."""
FEW_TOKENS = 20
"""Enough to show KV or experts that are not as they were."""
RANKS = [f"prefill-0.{rank}" for rank in range(2)] + [f"decode-0.{rank}" for rank in range(4)]


def complete(server: Server, num_tokens: int, prompt: str = "What is 12 + 30?") -> str:
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def members(log: str) -> Iterator[tuple[str, set[int]]]:
    """(unit, ranks) of every generation in a log, oldest first."""
    for unit, _, _, ranks in FORMED.findall(log):
        yield unit, {int(rank) for rank in ranks.split(",")}


def metric(server: Server, name: str) -> dict[str, float]:
    text = httpx.get(f"{server.url}/metrics", timeout=10).text
    found = re.findall(rf'^{name}{{unit="([^"]+)"}} (\S+)$', text, re.M)
    return {unit: float(value) for unit, value in found}


def test_units_of_many_ranks_start_answer_and_go_without_a_trace(
    start_server: StartServer,
) -> None:
    ranked = start_server(**RANKED)
    pids = ranked.pids()
    assert set(pids) == {"prefill-0", "decode-0", "gateway", *RANKS}
    assert len(set(pids.values())) == len(pids)
    assert len(ranked.shared_pools()) == len(RANKS)
    assert complete(ranked, FEW_TOKENS) == complete(ranked, FEW_TOKENS)
    audit = httpx.get(f"{ranked.url}/audit", timeout=30)
    assert audit.status_code == 200, audit.text
    assert metric(ranked, "hadal_unit_ranks") == {"prefill-0": 2.0, "decode-0": 4.0}
    assert metric(ranked, "hadal_unit_formation") == {"prefill-0": 1.0, "decode-0": 1.0}
    assert ranked.stop() == 0
    assert not any(is_alive(pid) for pid in pids.values())
    assert "Traceback" not in ranked.log()


@dataclass(frozen=True)
class PutOff:
    """A server of which a rank died before it was ready, until it was put off."""

    server: Server
    undisturbed: str
    last_pid: int


@pytest.fixture(scope="module")
def put_off() -> Iterator[PutOff]:
    with starting() as start:
        ranked = start(**RANKED)
        undisturbed, last_pid = complete(ranked, FEW_TOKENS), 0
        for _ in range(1 + FAILED_STARTS_MAX):
            wait_until(
                lambda gone=last_pid: ranked.pids()["decode-0.2"] not in (0, gone),
                "decode-0.2 is started",
            )
            last_pid = ranked.kill("decode-0.2")
        wait_until(
            lambda: "the others go on without it; it is started again" in ranked.log(),
            "it is put off",
        )
        yield PutOff(ranked, undisturbed, last_pid)


def test_a_rank_that_cannot_start_again_does_not_end_those_that_serve(put_off: PutOff) -> None:
    assert complete(put_off.server, FEW_TOKENS) == put_off.undisturbed
    wait_until(
        lambda: metric(put_off.server, "hadal_unit_ranks").get("decode-0") == 3.0,
        "it is missed",
    )


@pytest.mark.parametrize(
    ("victim", "number"), [("decode-0.2", signal.SIGKILL), ("prefill-0.0", signal.SIGSTOP)]
)
def test_a_rank_that_is_gone_is_replaced_and_takes_its_share_back(
    ranked: Server, victim: str, number: int
) -> None:
    model = ranked.model
    undisturbed = "".join(stream(ranked, NUM_TOKENS, model))
    unit, _, rank = victim.rpartition(".")
    others = {int(name.rpartition(".")[2]) for name in RANKS if name.startswith(f"{unit}.")} - {
        int(rank)
    }
    pieces: list[str] = []
    asking = threading.Thread(target=lambda: pieces.extend(stream(ranked, NUM_TOKENS, model)))
    asking.start()
    wait_until(lambda: len(pieces) > 2, "it streams")
    log_before, struck_s = len(ranked.log()), time.time()
    old_pid = ranked.kill(victim, number)
    asking.join(120)
    assert "".join(pieces) == undisturbed
    ranked.wait_restarted(victim, old_pid)
    assert not is_alive(old_pid)
    everybody = others | {int(rank)}

    def has_rejoined() -> bool:
        log = ranked.log()[log_before:]
        generations = [found for of, found in members(log) if of == unit]
        return len(generations) >= 2 and others in generations and generations[-1] == everybody

    wait_until(has_rejoined, f"{victim} belongs to {unit} again")
    found = noticed_in(ranked.log()[log_before:])
    noticed = {one.rank: one.at_s for one in found if (one.unit, one.gone) == (unit, int(rank))}
    assert noticed.keys() == others
    assert all(at_s >= struck_s - 0.01 for at_s in noticed.values())
    assert undisturbed.startswith("".join(stream(ranked, FEW_TOKENS, model)))
    wait_until(
        lambda: metric(ranked, "hadal_unit_ranks").get(unit) == len(everybody),
        "all ranks are counted",
    )
    assert len(ranked.shared_pools()) == len(RANKS)
    assert httpx.get(f"{ranked.url}/audit", timeout=30).status_code == 200


def test_health_tells_of_dead_ranks_within_two_seconds(ranked: Server) -> None:
    def health() -> tuple[int, str, list[str]]:
        reply = httpx.get(f"{ranked.url}/health", timeout=10)
        return reply.status_code, reply.json()["status"], reply.json()["missing"]

    wait_until(lambda: health() == (200, "ready", []), "nothing is missing")
    ranked.kill("decode-0.2")
    wait_until(lambda: health() == (200, "degraded", ["decode-0.2"]), "the dead rank is named")
    wait_until(lambda: health() == (200, "ready", []), "it is back")
    for rank in range(4):
        ranked.kill(f"decode-0.{rank}")
    everybody = [f"decode-0.{rank}" for rank in range(4)]
    wait_until(lambda: health() == (503, "degraded", everybody), "nobody is there to serve")
    wait_until(lambda: health() == (200, "ready", []), "all are back")


def test_no_rank_outlives_a_killed_supervisor(start_server: StartServer) -> None:
    ranked = start_server(**RANKED)
    pids, pools = list(ranked.pids().values()), ranked.shared_pools()
    ranked.process.kill()
    ranked.process.wait(5)
    wait_until(lambda: not any(is_alive(pid) for pid in pids), "every process is gone")
    wait_until(lambda: not set(pools) & set(os.listdir("/dev/shm")), "their memory is gone")


def test_a_rank_that_was_put_off_comes_back(put_off: PutOff) -> None:
    """The last test of the file: most of its rest has passed while the others ran."""
    put_off.server.wait_restarted("decode-0.2", put_off.last_pid, PUT_OFF_S + START_TIMEOUT_S)
    wait_until(
        lambda: metric(put_off.server, "hadal_unit_ranks").get("decode-0") == 4.0,
        "it is back",
    )
