"""The balancers of a live EP4 decode unit: it serves without a stop while experts and requests
move; no token shows it.

The load is of one task at a time, which asks for some experts far more than for others, and then of
another task. Every answer is compared with that of a server whose units are one rank each, where
nothing can move; test_exactness holds it to the plain single-request loop, and so does this for
some of the prompts. Times are printed, never asserted. `HADAL_LEVEL=all`: more regimes, twenty kills,
longer requests.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import httpx
import pytest
import torch

from bench.live_installs import FLIPPED, STAGING, Watched, ratio, read_flips, told
from bench.live_load import (
    Ask,
    ClosedLoop,
    balance_of,
    http_client,
    lognormal_lengths,
    read_metrics,
    task_prompts,
)
from bench.live_steps import STEPS_AT_ONCE, Step, periods, watch_steps
from hadal.model.checkpoint import load_weights
from hadal.reference.model import generate
from hadal.runtime.resolve import model_folder
from tests.dist.oracle import FULL
from tests.dist.serving import FORMED, Server, StartServer
from tests.dist.test_rank_faults import is_whole
from tests.fresh import fresh

UNIT = "decode-0"
REGIMES = ("letters", "arithmetic", "talk", "reverse") if FULL else ("letters", "arithmetic")
NUM_BALANCED = 3 if FULL else 1
"""Regimes that pay to be balanced. What pays is a matter of this machine's times, and of how the
one before lies.
"""
NUM_KILLS = 20 if FULL else 1
NUM_PROMPTS = 48 if FULL else 12
NUM_SKEWED = NUM_PROMPTS if FULL else 2
"""Of them, where experts only have to move: the fewer, the more skewed and the steadier are loads,
and the sooner it pays.
"""
MAX_TOKENS = 160 if FULL else 64
NUM_CHECKED = 3 if FULL else 1
"""Prompts of a regime that the plain loop is asked, too."""
NUM_CLIENTS = 32
WAIT_S = 120.0
"""For what takes a second or two on a machine of one's own."""
MIN_RISE = 0.03
"""Of the gauge, from its lowest in a regime; what it rises by is printed."""
QUIET_S = 2.0 if FULL else 0.6
PATIENCE_S = 90.0
"""For the first flips."""
REGIME_S = 15.0
"""After which another task is tried where the balancer finds nothing that pays."""
LATER_S = REGIME_S if FULL else 4.0
"""The same once a task was balanced, when nothing more has to pay."""
NUM_MOVING = 48 if FULL else 20
LONG_TOKENS = 600 if FULL else 220
STALL_STEPS = 3
MOVED = "hadal_replicas_moved_total"
NUM_SCENES = 10
"""Until a move is seen."""
ABANDONED = "keeps its placement: the formation is over"

Expected = dict[Ask, tuple[int, ...]]
Answers = Callable[[list[Ask]], Expected]


@pytest.fixture(scope="module")
def answers(server: Server) -> Answers:
    """What the server of single ranks answers to requests."""

    async def ask_all(asks: list[Ask]) -> Expected:
        async with http_client(server.url, NUM_CLIENTS) as http:
            loop = ClosedLoop(http, server.model, asks, 0)
            return dict(zip(asks, await asyncio.gather(*map(loop.ask, asks)), strict=True))

    return lambda asks: asyncio.run(ask_all(asks))


def prompts_of(task: str) -> list[tuple[int, ...]]:
    """Such as the model was trained for: what is foreign to it keeps other experts busy."""
    return task_prompts(task, [16] * NUM_PROMPTS, 11)


@pytest.fixture(scope="module")
def regimes(answers: Answers) -> dict[str, Expected]:
    """Single questions of each task, answered to their end."""
    found = {
        task: answers([Ask(prompt, MAX_TOKENS) for prompt in prompts_of(task)]) for task in REGIMES
    }
    torch.set_num_threads(1)
    weights = load_weights(model_folder(""))
    for expected in found.values():
        for ask in list(expected)[:NUM_CHECKED]:
            assert expected[ask] == tuple(
                generate(weights, ask.prompt, MAX_TOKENS, weights.config.eos_token_ids)
            )
    return found


def start(start_server: StartServer, **decode: Any) -> Server:
    """As configs/laptop_ep.toml."""
    return start_server(
        prefill={"ranks": 2, "kv_memory_mb": 64, "max_requests": 32},
        decode={
            "ranks": 4,
            "kv_memory_mb": 64,
            "max_requests": 32,
            "redundant_experts": 32,
            **decode,
        },
    )


class Serving:
    """A closed loop of greedy requests, every answer compared, and the gauges beside it."""

    def __init__(self, server: Server, http: httpx.AsyncClient, expected: Expected) -> None:
        self.server, self.http = server, http
        self.expected = dict(expected)
        self.wrong: list[str] = []
        self.loop = ClosedLoop(http, server.model, list(expected), NUM_CLIENTS, self._compare)

    def _compare(self, ask: Ask, tokens: tuple[int, ...]) -> None:
        if tokens != self.expected[ask]:
            self.wrong.append(
                f"prompt of {len(ask.prompt)} tokens: {tokens} instead of {self.expected[ask]}"
            )

    def switch(self, expected: Expected) -> None:
        self.expected |= expected
        self.loop.asks = list(expected)

    async def gauge(self, name: str) -> float:
        return (await read_metrics(self.http)).get(f'{name}{{unit="{UNIT}"}}', 0.0)

    async def generations(self, state: str) -> float:
        return (await read_metrics(self.http)).get(f'hadal_generations_now{{state="{state}"}}', 0.0)

    async def experts(self) -> float | None:
        return balance_of(await read_metrics(self.http), UNIT).get("experts")

    async def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Poll, with the load going on."""
        deadline_s = time.monotonic() + WAIT_S
        while not (value := condition()):
            self.loop.check()
            assert time.monotonic() < deadline_s, (
                f"after {WAIT_S:.0f} s still not: {what}\n{self.said()}"
            )
            await asyncio.sleep(0.01)
        return value

    async def until_log(self, pattern: str, tasks: Iterator[Expected], what: str) -> None:
        """Serve one task after the other until the leader says something new."""
        before, deadline_s = (
            len(re.findall(pattern, self.server.log(), re.M)),
            time.monotonic() + WAIT_S,
        )
        while len(re.findall(pattern, self.server.log(), re.M)) == before:
            assert time.monotonic() < deadline_s, (
                f"after {WAIT_S:.0f} s still not: {what}\n{self.said()}"
            )
            self.switch(next(tasks))
            change_s = time.monotonic() + REGIME_S
            while (
                len(re.findall(pattern, self.server.log(), re.M)) == before
                and time.monotonic() < change_s
            ):
                self.loop.check()
                await asyncio.sleep(0.01)

    def said(self) -> str:
        """The last that the leader said."""
        return "\n".join(
            [line for line in self.server.log().splitlines() if line.split()[1:2] == [UNIT]][-12:]
        )

    async def until_balanced(self, task: str, patience_s: float) -> bool:
        """Serve until layers have flipped, the gauge is above its lowest, and no layer flipped for
        a while.

        False: no layer has flipped in time, nothing pays. Fails where one has and it came to
        nothing.
        """
        num_flips, start_s = await self.gauge("hadal_layers_flipped_total"), time.monotonic()
        flips, changed_s, seen = num_flips, start_s, []
        while (now_s := time.monotonic()) < start_s + WAIT_S:
            await asyncio.sleep(0.2)
            self.loop.check()
            value, before = await self.experts(), flips
            flips = await self.gauge("hadal_layers_flipped_total")
            changed_s = now_s if flips != before else changed_s
            seen += [] if value is None else [value]
            lowest, last = min(seen, default=0.0), statistics.median(seen[-5:] or [0.0])
            if flips > num_flips and last > lowest + MIN_RISE and now_s > changed_s + QUIET_S:
                took_s = changed_s - start_s
                print(
                    f"{task}: balance {lowest:.3f} > {last:.3f}, {flips - num_flips:.0f} flips in"
                    f" {took_s:.1f} s"
                )
                return True
            if flips == num_flips and now_s > start_s + patience_s:
                print(f"{task}: balance {lowest:.3f} > {last:.3f} without a flip")
                return False
        pytest.fail(
            f"{task}: balance {seen[:5]} > {seen[-5:]} in {WAIT_S:.0f} s, {flips - num_flips:.0f}"
            " flips"
        )


@pytest.mark.timeout(1200)
def test_balance_rises_while_it_serves(
    start_server: StartServer, regimes: dict[str, Expected]
) -> None:
    server = start(start_server)
    pids = server.pids()
    steps: list[Step] = []

    async def scene() -> None:
        async with http_client(server.url, NUM_CLIENTS) as http:
            serving = Serving(server, http, regimes[REGIMES[0]])
            generation = await serving.gauge("hadal_unit_formation")
            is_over = False
            async with serving.loop:
                watching = asyncio.create_task(watch_steps(http, UNIT, steps, lambda: is_over))
                num_balanced = 0
                for task in REGIMES:
                    serving.switch(regimes[task])
                    num_balanced += await serving.until_balanced(
                        task, LATER_S if num_balanced else PATIENCE_S
                    )
                # Where other parts for the replicas where they are were enough, the questions go on
                # changing until some have to move.
                tasks, deadline_s = cycle(REGIMES), time.monotonic() + WAIT_S
                while not await serving.gauge(MOVED) and time.monotonic() < deadline_s:
                    serving.switch(regimes[task := next(tasks)])
                    await serving.until_balanced(task, LATER_S)
                is_over = True
                await watching
                await serving.loop.finish()
            assert num_balanced >= NUM_BALANCED
            assert serving.wrong == []
            assert serving.loop.num_answers >= NUM_CLIENTS
            assert await serving.gauge(MOVED) > 0
            assert await serving.gauge("hadal_unit_formation") == generation
            assert (await read_metrics(http))["hadal_retries_total"] == 0
            assert (await http.get("/audit")).status_code == 200

    asyncio.run(scene())
    assert server.pids() == pids
    tell_steps(server, steps)


def tell_steps(server: Server, steps: list[Step]) -> None:
    """Print how long steps took from one to the next, during installations and else."""
    watched = Watched(read_flips(server.log(), UNIT), periods(steps), [])
    during, outside = watched.during(), watched.outside()
    print(
        f"installing: {told(during)}; else: {told(outside)}; p99 over p99: {ratio(during, outside)}"
    )


def newest_generation(server: Server) -> int:
    return max(
        (int(number) for unit, number, *_ in FORMED.findall(server.log()) if unit == UNIT),
        default=0,
    )


@pytest.mark.timeout(3600)
def test_a_rank_dies_while_experts_move(
    start_server: StartServer, regimes: dict[str, Expected]
) -> None:
    seed = fresh().randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    num_hit = 0
    # Other questions each time, as the balance of some is one that needs no other place.
    tasks = [
        dict(islice(expected.items(), first, first + NUM_SKEWED))
        for first in range(0, NUM_PROMPTS, NUM_SKEWED)
        for expected in regimes.values()
        if first < len(expected)
    ]
    for _ in range(NUM_KILLS):
        # Each on a new server: from the first placement on there is always something that pays to
        # be moved.
        server = start(start_server)
        num_hit += asyncio.run(one_kill(server, rng, cycle(tasks)))
        assert len(server.shared_pools()) == 2 + 4
        assert server.stop() == 0
    print(f"{num_hit} of {NUM_KILLS} kills hit an installation")


async def one_kill(server: Server, rng: random.Random, tasks: Iterator[Expected]) -> bool:
    """In the middle of an installation, as near as one can see it. Whether it was."""
    async with http_client(server.url, NUM_CLIENTS) as http:
        serving = Serving(server, http, next(tasks))
        async with serving.loop:
            await serving.until_log(STAGING.format(unit=UNIT), tasks, "an installation begins")
            await asyncio.sleep(rng.uniform(0.0, 0.02))
            generation = newest_generation(server)
            server.kill(f"{UNIT}.{rng.randrange(4)}")
            # One without it, one with its successor.
            await serving.until(
                lambda: newest_generation(server) >= generation + 2, "the unit forms anew, twice"
            )
            await serving.until(lambda: is_whole(server), "every rank is back")
            await serving.until_log(FLIPPED.format(unit=UNIT), tasks, "balancing goes on")
            await serving.loop.finish()
        assert serving.wrong == []
        assert (await http.get("/audit")).status_code == 200
    return ABANDONED in server.log()


def stalls(steps: Sequence[Step]) -> list[int]:
    """How long each dip in the number of computed requests was, in steps, of a unit that nobody
    joins any more.

    What a later step computes was running before as well: where fewer are computed than later,
    somebody stood still.
    """
    later, dips, length = 0, [], 0
    for step in reversed(steps):
        if step.num_tokens < later:
            length += 1
        elif length:
            dips.append(length)
            length = 0
        later = max(later, step.num_tokens)
    return dips


def test_stalls_are_dips() -> None:
    def numbers(*num_tokens: int) -> list[Step]:
        return [Step(i, 0.0, 0.0, num, {}) for i, num in enumerate(num_tokens)]

    assert stalls(numbers(5, 5, 4, 4, 2)) == []
    assert stalls(numbers(5, 4, 4, 5, 5, 3, 4, 4)) == [1, 2]


@pytest.mark.timeout(900)
def test_requests_move_and_go_on(start_server: StartServer, answers: Answers) -> None:
    """Half of the clients leave once all are served, so that the others lie unevenly; nobody joins
    after that.
    """
    # Of about one length: no move helps a rank that a single long one fills.
    prompts = task_prompts("arithmetic", lognormal_lengths(NUM_MOVING, 200.0, 0.3, seed=13), 14)
    asks = [Ask(prompt, LONG_TOKENS, ignore_eos=True) for prompt in prompts]
    expected = answers(asks)
    # Else a step might wait for a flip, too.
    server = start(start_server, max_requests=NUM_MOVING // 2, expert_balance="off")

    async def scene(seed: int) -> list[int]:
        shuffled = random.Random(seed).sample(asks, NUM_MOVING)
        stay, leave = shuffled[::2], shuffled[1::2]
        steps: list[Step] = []
        async with http_client(server.url, NUM_MOVING) as http:
            serving = Serving(server, http, expected)
            staying = asyncio.gather(*map(serving.loop.ask, stay))
            leaving = asyncio.gather(*map(serving.loop.ask, leave))
            watching = asyncio.create_task(watch_steps(http, UNIT, steps, staying.done))
            while await serving.generations("decoding") < NUM_MOVING:
                assert not staying.done(), "the first had ended before the last began"
                await asyncio.sleep(0.05)
            leaving.cancel()
            left_s = time.perf_counter()
            found = await staying
            # One more, alone, whose steps let the last traces end.
            await serving.loop.ask(Ask(asks[0].prompt, 3 * STEPS_AT_ONCE, ignore_eos=True))
            await watching
            assert [
                ask for ask, tokens in zip(stay, found, strict=True) if tokens != expected[ask]
            ] == []
            num_moved = await serving.gauge("hadal_requests_moved_total")
            dips = stalls([step for step in steps if step.start_s > left_s])
            print(f"{num_moved:.0f} requests moved; steps that somebody stood still: {dips}")
            assert max(dips, default=0) <= STALL_STEPS
            assert (await read_metrics(http))["hadal_retries_total"] == 0
            assert (await http.get("/audit")).status_code == 200
            return dips if num_moved else []

    # Those who stay may lie evenly, and who moved while others still joined stands among rows that
    # come and go: then once more, and others leave.
    assert any(asyncio.run(scene(seed)) for seed in range(NUM_SCENES)), (
        "nobody stood still where it could be seen"
    )
