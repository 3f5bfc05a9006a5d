"""Time to the first and the second token of a long prompt over a limited link, with early pull and without.

    python -m bench.early_pull [--tokens 4096] [--mbit 1000] [--rounds 5]

Prefill and decode run on two hosts: network namespaces on one machine, with a Ray node each and a limited
link (tests/dist/hosts.py; needs root). Both deployments run all the while and are asked in
turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from bench.checkpoints import mid_model
from bench.client import Stream
from bench.hosts import Deployed, ready
from tests.dist.hosts import Hosts, why_no_hosts

NUM_TOKENS = 8
"""Tokens of an answer."""


def ask(deployed: Deployed, model: Path, num_tokens: int) -> Stream:
    """Send one random prompt. Raises RuntimeError if the answer fails."""
    (one,) = deployed.ask(model, 1, NUM_TOKENS, num_tokens)
    if one.error or len(one.piece_times_s) < NUM_TOKENS:
        raise RuntimeError(one.error or "tokens came together")
    return one


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.early_pull", description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--mbit", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if why := why_no_hosts():
        raise SystemExit(why)
    console, model = Console(), mid_model()
    unit = {"threads": 2, "kv_blocks": 1 + 2 * options.tokens // 64}
    found: dict[str, list[Stream]] = {"auto": [], "off": []}
    with (
        tempfile.TemporaryDirectory(prefix="hadal-b-") as name,
        Hosts(4) as hosts,
        ExitStack() as stack,
    ):
        for host in hosts:
            host.label = f"hadal={'auto' if host.number < 2 else 'off'}"
            host.shape("tbf", "rate", f"{options.mbit}mbit", "burst", "1mb", "latency", "100ms")
        hosts.start_ray(2, 2, 2, 2)
        deployed = {}
        for number, early_pull in ((0, "auto"), (2, "off")):
            folder = Path(name) / early_pull
            folder.mkdir()
            tables = {
                "model": str(model),
                "prefill": {**unit, "ranks_per_node": 1},
                "decode": {**unit, "ranks_per_node": 1},
                "early_pull": early_pull,
                "cluster": {**hosts.cluster, "label": hosts[number].label},
            }
            server = hosts.serve(folder, f"serve{early_pull}", number, **tables)
            stack.enter_context(ready(hosts, server, number))
            deployed[early_pull] = Deployed(hosts[number], server.url)
        for turn in range(-1, options.rounds):
            for early_pull in sorted(deployed, reverse=bool(turn % 2)):
                one = ask(deployed[early_pull], model, options.tokens)
                if turn >= 0:
                    found[early_pull].append(one)
    for early_pull, streams in found.items():
        first = statistics.median(each.first_s for each in streams)
        second = statistics.median(each.piece_times_s[1] - each.started_s for each in streams)
        console.print(
            f"early_pull {early_pull}: first token {1e3 * first:.0f} ms, second {1e3 * second:.0f} ms"
        )


if __name__ == "__main__":
    main()
