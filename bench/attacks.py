"""Measure how one tenant's attacks affect another tenant's requests: the number of answered ones, and their
median, p95 and longest time, first without an attack and then during it.

    python -m bench.attacks [--quick] [--checkout FOLDER] [--attack NAME ...]

Each attack gets a server of its own, with two API keys without special rights. One key asks for 32 tokens
again and again, first alone and then while a process with the other key attacks. `--checkout` serves another
checkout, such as an earlier commit's, with the Python of its .venv if it has one. One claim is checked: while
bodies that are costly before admission arrive, the other tenant's p95 is at most 1.5 times its p95 alone.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.claims import Claim, print_claims
from bench.server import Address, request, serving
from bench.subject import ROOT
from bench.tables import parser_of, percentile, table_of

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
ATTACKER, OTHER = "key-of-the-attacker", "key-of-the-other"
ANSWER_TOKENS = 32
WAIT_S = 30.0
"""Timeout of an answer, seconds; a later answer counts as missing."""
NUM_PROMPTS, NUM_CHOICES = 64, 8
NUM_FLOODS, NUM_STREAMS = 3, 200
NUM_DRIBBLES = 790
NUM_UNREAD = 64
NUM_CANCELS = 32
CANCEL_AFTER_S = 0.1
BYTE_AFTER_S = 1.0
NUM_BIG = 4
NUM_BODIES = 3
BODIES_BAR = 1.5
MIB = 1 << 20
TCP_ESTABLISHED = 1
"""TCP state of a connection that neither side has closed (Linux, tcp_states.h)."""


# ---- the attacks: each runs until its process is ended ----
def head(address: Address, num_bytes: int, path: str = "/v1/completions") -> bytes:
    """Return the head of a POST with a body of `num_bytes` and the attacker's key."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: {address[0]}\r\nAuthorization: Bearer"
        f" {ATTACKER}\r\nContent-Type: application/json\r\nContent-Length: {num_bytes}\r\n\r\n"
    ).encode()


@asynccontextmanager
async def asked(address: Address, num_bytes: int, content: bytes) -> AsyncIterator[Connection]:
    """Open a connection and send the head of a request with a body of `num_bytes`, then `content`, which may
    be only the body's beginning. Yields (reader, writer).
    """
    reader, writer = await asyncio.open_connection(*address)
    with closing(writer):
        writer.write(head(address, num_bytes) + content)
        yield reader, writer


def body_of(fields: dict[str, Any]) -> bytes:
    """Return `fields` as the JSON body of a generation that ignores EOS."""
    return json.dumps({"model": "hadal-tiny", "ignore_eos": True, **fields}).encode()


def prompts_of(random_: random.Random) -> list[str]:
    """Return different prompts, as many as a request may have."""
    return [
        f"What is {random_.randrange(10_000)} + {random_.randrange(10_000)}?"
        for _ in range(NUM_PROMPTS)
    ]


async def flood(address: Address, number: int, **fields: Any) -> None:
    """Send requests of 64 prompts with 8 choices each, one after the other; pause for 0.5 s after a refusal."""
    random_ = random.Random(number)
    while True:
        body = body_of(
            {
                "prompt": prompts_of(random_),
                "n": NUM_CHOICES,
                "max_tokens": 256,
                "temperature": 1,
                **fields,
            }
        )
        async with asked(address, len(body), body) as (reader, _):
            is_refused = not (await reader.readline()).startswith(b"HTTP/1.1 200")
            while not is_refused and await reader.read(65536):
                continue
        if is_refused:
            await asyncio.sleep(0.5)


async def streams(address: Address, number: int) -> None:
    """Request a stream of 256 tokens, and the next one as soon as it ends."""
    for turn in itertools.count():
        prompt = f"Number {number} {turn}: tell"
        body = body_of({"prompt": prompt, "max_tokens": 256, "stream": True})
        async with asked(address, len(body), body) as (reader, _):
            tail = b" "
            while tail and b"[DONE]" not in tail:
                tail = await reader.read(65536)


async def flood_first(address: Address, number: int) -> None:
    """Flood with priority 4, above every other tenant's requests."""
    await flood(address, number, priority=4)


async def dribble(address: Address, number: int) -> None:
    """Send a body that never ends, one byte per second; reconnect when the server closes the connection."""
    while True:
        async with asked(address, 1000, b"") as (_, writer):
            while not writer.is_closing():
                await asyncio.sleep(BYTE_AFTER_S)
                writer.write(b" ")
                await writer.drain()


async def unread(address: Address, number: int) -> None:
    """Start a stream with large events (8 choices, log-probabilities), and read nothing."""
    loop = asyncio.get_running_loop()
    fields = {
        "prompt": "Once",
        "n": NUM_CHOICES,
        "max_tokens": 1000,
        "stream": True,
        "logprobs": 5,
        "seed": number,
    }
    body = body_of(fields)
    while True:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            await loop.sock_connect(connection, address)
            await loop.sock_sendall(connection, head(address, len(body)) + body)
            while (
                connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_ESTABLISHED
            ):
                await asyncio.sleep(0.2)


async def cancel(address: Address, number: int) -> None:
    """Start a stream of 8 choices and disconnect after CANCEL_AFTER_S, again and again."""
    for turn in itertools.count():
        body = body_of(
            {"prompt": f"Say {number} {turn}", "n": NUM_CHOICES, "max_tokens": 1000, "stream": True}
        )
        async with asked(address, len(body), body):
            await asyncio.sleep(CANCEL_AFTER_S)


async def big_ids(address: Address, number: int) -> None:
    """Send bodies of 4 MiB of token ids, one after the other."""
    ids = b"7," * (2 * MIB - 64)
    body = b'{"model":"hadal-tiny","prompt":[' + ids + b"7]}"
    while True:
        async with asked(address, len(body), body) as (reader, _):
            await reader.readline()


def costly_bodies() -> list[tuple[str, bytes]]:
    """Return (path, body) pairs that cost most before admission: bodies near the largest accepted size, and a
    schema of 400 levels.
    """
    words = "So it goes, and no 2 of 345 lines are alike. " * (4 * MIB // 46)
    letters = "ab" * (2 * MIB - 1000)
    nested: dict[str, Any] = {"type": "string"}
    for depth in range(400):
        nested = {"type": "object", "properties": {f"p{depth}": nested, "q": {"enum": [1, 2, 3]}}}
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": nested}}
    user = {"role": "user", "content": "Hi"}
    chat = "/v1/chat/completions"
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/tokenize", {"prompt": words}),
        ("/tokenize", {"prompt": letters}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": words}]}),
        ("/v1/completions", {"prompt": words}),
        (chat, {"messages": [user] * 100_000}),
        (chat, {"messages": [user], "response_format": schema}),
    ]
    return [
        (path, json.dumps({"model": "hadal-tiny", **fields}).encode()) for path, fields in bodies
    ]


async def costly(address: Address, number: int) -> None:
    """Send costly bodies, one after the other, one connection at a time."""
    bodies = costly_bodies()
    for path, body in itertools.cycle(bodies[number:] + bodies[:number]):
        reader, writer = await asyncio.open_connection(*address)
        with closing(writer):
            writer.write(head(address, len(body), path) + body)
            await reader.readline()


@dataclass(frozen=True)
class Attack:
    """One kind of attack: the attacking process runs `task` `num_tasks` times concurrently."""

    name: str
    what: str
    task: Callable[[Address, int], Awaitable[None]]
    num_tasks: int
    bar: float = 0.0
    """Largest allowed p95 of the other tenant, as a multiple of its p95 alone; 0: no claim is made."""


ATTACKS = {
    attack.name: attack
    for attack in (
        Attack("flood_first", "1,536 generations at priority 4", flood_first, NUM_FLOODS),
        Attack("flood", "1,536 generations", flood, NUM_FLOODS),
        Attack("streams", "200 streams", streams, NUM_STREAMS),
        Attack("dribble", "790 bodies that never end", dribble, NUM_DRIBBLES),
        Attack("unread", "64 streams that nobody reads", unread, NUM_UNREAD),
        Attack("cancel", "32 loops that leave after 0.1 s", cancel, NUM_CANCELS),
        Attack("big_ids", "4 loops of 4 MiB of token ids", big_ids, NUM_BIG),
        Attack("costly", "3 loops of costly bodies", costly, NUM_BODIES, BODIES_BAR),
    )
}


async def attack_for_ever(address: Address, attack: Attack) -> None:
    """Run the attack until the process is ended. Prints a line when it begins."""
    print("begun", flush=True)
    await asyncio.gather(*(_again(attack, address, number) for number in range(attack.num_tasks)))


async def _again(attack: Attack, address: Address, number: int) -> None:
    while True:
        try:
            await attack.task(address, number)
        except (OSError, asyncio.IncompleteReadError):
            await asyncio.sleep(0.1)


# ---- the other tenant ----
@dataclass(frozen=True)
class Seen:
    """Results of the other tenant's requests."""

    times_s: tuple[float, ...]
    """Seconds of the answered requests."""
    refusals: tuple[int, ...]
    """HTTP statuses of the requests that failed; 0: no answer within WAIT_S, or a broken connection."""

    @property
    def answered(self) -> str:
        """Number of answered and of all requests as text, such as "3 of 5"."""
        return f"{len(self.times_s)} of {len(self.times_s) + len(self.refusals)}"

    @property
    def median_s(self) -> float:
        """Median seconds of the answered requests; infinite if there are none."""
        return statistics.median(self.times_s) if self.times_s else float("inf")

    @property
    def late_s(self) -> float:
        """p95 of all requests, in seconds; a refused or unanswered one counts as WAIT_S."""
        return percentile([*self.times_s, *[WAIT_S] * len(self.refusals)], 0.95)

    @property
    def worst_s(self) -> float:
        """Longest answer in seconds; WAIT_S if a request was unanswered. Refused requests do not count."""
        return max(self.times_s, default=0.0) if 0 not in self.refusals else WAIT_S


def ask(address: Address, number: int) -> tuple[int, float]:
    """Send one request of the other tenant. Return (status, seconds); status 0: no answer within WAIT_S,
    or a broken connection.
    """
    body = {
        "model": "hadal-tiny",
        "prompt": f"Number {number}: tell me a story.",
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
    }
    started_s, status = time.perf_counter(), 0
    with suppress(OSError):
        status, _ = request(address, "POST", "/v1/completions", body, OTHER, WAIT_S)
    return status, time.perf_counter() - started_s


def watch(address: Address, span_s: float, most: int, numbers: itertools.count[int]) -> Seen:
    """Send requests one after the other for `span_s` seconds, at most `most` of them. Return their results."""
    times_s, refusals = [], []
    until_s = time.perf_counter() + span_s
    while time.perf_counter() < until_s and len(times_s) + len(refusals) < most:
        status, taken_s = ask(address, next(numbers))
        if status == 200:
            times_s.append(taken_s)
        else:
            refusals.append(status)
            time.sleep(0.1)
    return Seen(tuple(times_s), tuple(refusals))


# ---- the table ----
def measure(attack: Attack, checkout: Path, span_s: float, num_alone: int) -> tuple[Seen, Seen]:
    """Return the other tenant's results (alone, during the attack)."""
    keys = {"HADAL_API_KEYS": f"{ATTACKER},{OTHER}"}
    with serving(environment=keys, checkout=checkout) as server:
        numbers = itertools.count()
        # Warm up, because the first requests are slow without any attack.
        watch(server.address, WAIT_S, 3, numbers)
        alone = watch(server.address, span_s, num_alone, numbers)
        return alone, watch_attacked(server.address, attack, span_s, numbers)


def watch_attacked(
    address: Address, attack: Attack, span_s: float, numbers: itertools.count[int]
) -> Seen:
    """Measure the other tenant during the attack. Raises RuntimeError if the attacking process ends early."""
    host, port = address
    command = [sys.executable, "-m", "bench.attacks", "--as-attacker", attack.name, host, str(port)]
    attacker = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        assert attacker.stdout is not None
        attacker.stdout.readline()
        time.sleep(min(3.0, max(1.25, span_s / 2)))  # Let the attack reach its full load.
        seen = watch(address, span_s, 10_000, numbers)
        if attacker.poll() is not None:
            raise RuntimeError(
                f"the attack {attack.name} ended by itself with {attacker.returncode}"
            )
        return seen
    finally:
        attacker.kill()
        attacker.communicate(timeout=10)


def show(rows: Sequence[tuple[Attack, Seen, Seen]]) -> None:
    """Print a table with a row for each attack, then the claims."""
    table = table_of(
        "attack|alone p50|p95|worst|attacked: answered|p50|p95|worst|p50 ratio|refused with",
        "another tenant's requests of 32 tokens, one after the other",
    )
    for attack, alone, seen in rows:
        refused = ", ".join(str(status or "no answer") for status in sorted(set(seen.refusals)))
        table.add_row(
            attack.what,
            _ms(alone.median_s),
            _ms(alone.late_s),
            _ms(alone.worst_s),
            seen.answered,
            _ms(seen.median_s),
            _ms(seen.late_s),
            _ms(seen.worst_s),
            f"{seen.median_s / alone.median_s:.1f}",
            refused,
        )
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    claims = [
        Claim(
            f"another tenant's p95 beside {attack.what}",
            seen.late_s / alone.late_s,
            "its p95 alone",
            attack.bar,
            is_most=True,
        )
        for attack, alone, seen in rows
        if attack.bar
    ]
    print_claims(console, claims)


def _ms(time_s: float) -> str:
    return "-" if time_s == float("inf") else f"{time_s * 1e3:,.0f} ms"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("attacks", __doc__, "seconds for each attack")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="serve this checkout")
    parser.add_argument("--attack", action="append", choices=list(ATTACKS), help="only this one")
    parser.add_argument(
        "--as-attacker", nargs=3, metavar=("NAME", "HOST", "PORT"), help=argparse.SUPPRESS
    )
    options = parser.parse_args(arguments)
    if options.as_attacker is not None:
        name, host, port = options.as_attacker
        asyncio.run(attack_for_ever((host, int(port)), ATTACKS[name]))
        return
    span_s, num_alone = (6.0, 10) if options.quick else (30.0, 40)
    chosen = [ATTACKS[name] for name in options.attack or ATTACKS]
    show([(attack, *measure(attack, options.checkout, span_s, num_alone)) for attack in chosen])


if __name__ == "__main__":
    main()
