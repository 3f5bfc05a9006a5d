"""Compare the time of a prompt that another tenant has sent with that of a new prompt.

    python -m bench.cache_tenants [--quick]

A tenant that could tell them apart would learn what others ask. The names of blocks are salted by
tenant, so both are computed whole, by the same steps (tests/dist/test_cache_tenants.py counts them).
Here two tenants take turns: prompts that the other one has sent, prompts that are new, and prompts
that the tenant has sent itself, in random order. The first two kinds shall take the same time; the
third shows that a hit would be seen. Medians are of one run, so their ratios hold on a busy machine
too; the statistical power is that of the samples.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from bench.claims import Claim, print_claims
from bench.server import Running, launched, wait_ready

ALICE, BOB = "alice-key", "bob-key"
NUM_TOKENS = 700
"""Tokens of a prompt: computing them takes several times what finding them does."""
NUM_OTHER = 200
"""Tokens of a request in between, so that the first measured one does not follow its own prompt."""
NUM_SAMPLES, NUM_QUICK = 100, 24
KINDS = ("another's", "new", "own")
BAR = 1.25
"""Most that the slower of both may take, in times of the faster: more than the noise of the medians, and
far less than what a hit saves.
"""


def ask(running: Running, key: str, prompt: Sequence[int]) -> float:
    """Return the seconds that a request took. Raises RuntimeError if it failed."""
    body = {
        "model": "hadal-tiny",
        "prompt": list(prompt),
        "temperature": 0,
        "max_tokens": 1,
    }
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection = http.client.HTTPConnection(*running.address, timeout=120)
    try:
        start_s = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        content = reply.read()
        took_s = time.perf_counter() - start_s
    finally:
        connection.close()
    if reply.status != 200:
        raise RuntimeError(f"POST /v1/completions was answered with {reply.status}: {content!r}")
    return took_s


def measure(num_samples: int) -> dict[str, list[float]]:
    """Return seconds of Bob's requests by kind, `num_samples` of each."""
    rng = random.Random(11)
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}

    def text(num_tokens: int) -> list[int]:
        return [rng.randrange(20, 1500) for _ in range(num_tokens)]

    keys = {"HADAL_API_KEYS": f"{ALICE},{BOB}"}
    with launched("[prefill]\nkv_memory_mb = 256\n", keys) as running:
        wait_ready(running)
        ask(running, BOB, text(NUM_TOKENS))
        for _ in range(num_samples):
            kind_to_prompt = {kind: text(NUM_TOKENS) for kind in KINDS}
            ask(running, ALICE, kind_to_prompt["another's"])
            ask(running, BOB, kind_to_prompt["own"])
            ask(running, BOB, text(NUM_OTHER))
            for kind in rng.sample(KINDS, len(KINDS)):
                seconds[kind].append(ask(running, BOB, kind_to_prompt[kind]))
    return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cache_tenants", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--quick", action="store_true", help=f"{NUM_QUICK} samples of each kind")
    options = parser.parse_args(arguments)
    console = Console()
    seconds = measure(NUM_QUICK if options.quick else NUM_SAMPLES)
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    table = Table(title=f"prompts of {NUM_TOKENS} tokens, by their KV", title_justify="left")
    for column in ("KV", "median ms", "times a new one's"):
        table.add_column(column, justify="right")
    for kind in KINDS:
        table.add_row(kind, f"{1e3 * medians[kind]:.1f}", f"{medians[kind] / medians['new']:.3f}")
    console.print(table)
    ratio = max(medians["another's"], medians["new"]) / min(medians["another's"], medians["new"])
    claims = [
        Claim("another tenant's prompt takes the time of a new one", ratio, "the other", BAR, True),
        Claim("a hit would be seen", medians["new"] / medians["own"], "an own prompt's time", 1.5),
    ]
    print_claims(console, claims)


if __name__ == "__main__":
    main()
