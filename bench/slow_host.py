"""One host's link becomes slow while streams run: how long they stand still, with rests and without.

    python -m bench.slow_host [--quick] [--delay-ms 20] [--lost 0.05]

Five hosts are network namespaces on one machine with a Ray node each (tests/dist/hosts.py; needs
root): prefill is on one, and a decode unit of four ranks on the others. What goes over the slow
link comes 20 ms later each way, and a twentieth of the packets never comes (tests/dist/link.py).
With `slow_host_rest_s` the unit goes on without the host; without it the unit bears it.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.claims import Claim, print_claims
from bench.client import Stream, stream
from bench.hosts import ready
from tests.dist.hosts import Host, Hosts, why_no_hosts

NUM_STREAMS = 8
NUM_TOKENS = 400
BEFORE_S = 8.0
SLOW_S, QUICK_SLOW_S = 75.0, 40.0
"""With the first host that rests taken back in it, and found slow again; or not."""
AFTER_S = 8.0
GAP_S = 20.0
REST_S = 30.0
GAIN_BAR = 3.0
SMALL = {"threads": 1, "ranks_per_node": 1, "kv_blocks": 96}


@dataclass
class Phase:
    """What all streams got while the link was as it was."""

    name: str
    began_s: float
    ended_s: float = 0.0

    def gap_s(self, streams: Sequence[Stream]) -> float:
        """The longest gap between two pieces of a stream, among gaps that overlap the phase."""
        gaps = [
            later - earlier
            for each in streams
            for earlier, later in pairwise((each.started_s, *each.piece_times_s))
            if later > self.began_s and earlier < self.ended_s
        ]
        return max(gaps, default=0.0)

    def pieces_per_s(self, streams: Sequence[Stream]) -> float:
        """Of all streams together."""
        times_s = [time_s for each in streams for time_s in each.piece_times_s]
        num = sum(self.began_s <= time_s < self.ended_s for time_s in times_s)
        return num / (self.ended_s - self.began_s)


async def ask(
    address: tuple[str, int], number: int, until: asyncio.Event, found: list[Stream]
) -> None:
    """One stream after another until the event, the last to its end."""
    body = {
        **{"model": "hadal-tiny", "max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True},
        **{"prompt": f"{number} and so on"},
    }
    while not until.is_set():
        found.append(await stream(address, "/v1/completions", body))


async def disturb(
    url: str, host: Host, link: tuple[float, float], slow_s: float
) -> tuple[list[Phase], list[Stream]]:
    """Ask all the while, and have the link slow for a part of it."""
    name, _, port = url.removeprefix("http://").partition(":")
    over, found = asyncio.Event(), list[Stream]()
    asking = [
        asyncio.create_task(ask((name, int(port)), number, over, found))
        for number in range(NUM_STREAMS)
    ]
    phases = [Phase("before", time.perf_counter())]
    await asyncio.sleep(BEFORE_S)
    with host.slow_link(*link):
        phases.append(Phase("slow", time.perf_counter()))
        await asyncio.sleep(slow_s)
    phases.append(Phase("after", time.perf_counter()))
    await asyncio.sleep(AFTER_S)
    over.set()
    for earlier, later in pairwise((*phases, Phase("", time.perf_counter()))):
        earlier.ended_s = later.began_s
    await asyncio.gather(*asking)
    return phases, found


def measure(
    rest_s: float, link: tuple[float, float], slow_s: float
) -> tuple[list[Phase], list[Stream], int]:
    """Return the phases, the streams, and how often a host rested."""
    with Hosts(5) as hosts, tempfile.TemporaryDirectory(prefix="hadal-b-") as folder:
        hosts.start_ray(2, 1, 1, 1, 1)
        tables = {
            "host": "0.0.0.0",
            "slow_host_rest_s": rest_s,
            "prefill": SMALL,
            "decode": {**SMALL, "ranks": 4},
        }
        with ready(hosts, hosts.serve(Path(folder), **tables)) as server:
            processes = server.status().processes
            of_ranks = [processes[f"decode-0.{rank}"].host for rank in range(4)]
            far = [name for name in of_ranks if name != processes["decode-0"].host]
            host = hosts[int(far[-1].removeprefix("host-"))]
            phases, streams = hosts[0].call(
                lambda: asyncio.run(disturb(server.url, host, link, slow_s))
            )
            # The leader says it, and the supervisor once more.
            num_rests = server.log().count("that host rests for") // 2
        return phases, streams, num_rests


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        "python -m bench.slow_host",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="40 s of a slow link instead of 75")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="each way (20)")
    parser.add_argument("--lost", type=float, default=0.05, help="share of packets (0.05)")
    asked = parser.parse_args(arguments)
    if why := why_no_hosts():
        raise SystemExit(why)
    console = Console(width=120)
    link = asked.delay_ms / 1e3, asked.lost
    slow_s = QUICK_SLOW_S if asked.quick else SLOW_S
    table = Table("rests", "link", "pieces/s", "longest gap s", "errors", "hosts that rested")
    gaps_s, pieces_per_s = {}, {}
    for rest_s in (REST_S, 0.0):
        phases, streams, num_rests = measure(rest_s, link, slow_s)
        errors = [each.error for each in streams if each.error]
        for phase in phases:
            gaps_s[rest_s, phase.name] = phase.gap_s(streams)
            pieces_per_s[rest_s, phase.name] = phase.pieces_per_s(streams)
            table.add_row(
                f"{rest_s:g} s" if rest_s else "never",
                phase.name,
                f"{phase.pieces_per_s(streams):,.0f}",
                f"{phase.gap_s(streams):.1f}",
                str(len(errors)),
                str(num_rests),
            )
    console.print(table)
    longest_s = max(gap_s for (rest_s, _), gap_s in gaps_s.items() if rest_s)
    bound = Claim(
        "no stream stands still for long over a slow link",
        longest_s / GAP_S,
        f"{GAP_S:g} s",
        1.0,
        is_most=True,
    )
    gain = Claim(
        "a unit goes on faster without a host on a slow link",
        pieces_per_s[REST_S, "slow"] / pieces_per_s[0.0, "slow"],
        "what it makes with that host",
        GAIN_BAR,
    )
    print_claims(console, [bound, gain])


if __name__ == "__main__":
    main()
