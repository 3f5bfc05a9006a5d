"""A process that writes a ledger until it is killed, and prints which facts were acknowledged as
durable. It is forked from a warm process (served.py). The kernel kills it when the test's process
ends.

    tests.dist.ledger_child URL SEED NAME [LIMIT [OUTAGES]]

Lines on stdout: `A id...` for durable facts. Facts are a function of their id, and many are written
twice; some facts are named "both-...", and other such processes write them too. With LIMIT it exits
normally after LIMIT facts. With OUTAGES (0 to 1) the database is down for that share of its writes,
so that facts wait in the outbox.
"""

import os
import random
import sys
import time
from collections.abc import Sequence
from hashlib import blake2b

from hadal.core.facts import Fact, PackedFacts, RequestFact, sum_kv_tokens
from hadal.runtime.ledger.address import ledger_url, outbox_of
from hadal.runtime.ledger.outbox import LedgerOutbox
from hadal.runtime.ledger.store import Store, StoreDown
from hadal.runtime.ledger.writer import LedgerWriter
from hadal.stats.ledger import Written
from hadal.stats.prices import R1

NUM_BOTH = 300
START_S = 1_740_628_800


def fact_of(request_id: str) -> RequestFact:
    """Return the only fact that exists for this id."""
    rng = random.Random(blake2b(request_id.encode(), digest_size=8).digest())
    hit, miss, out = rng.randrange(5000), rng.randrange(5000), rng.randrange(1, 2000)
    completed_us = START_S * 10**6 + rng.randrange(86_400 * 10**6)
    completed_s = completed_us / 1e6
    return RequestFact(
        request_id,
        f"t{rng.randrange(3)}",
        f"m{rng.randrange(2)}",
        hit,
        miss,
        out,
        sum_kv_tokens(hit + miss, out),
        rng.choice(("stop", "length", "cancelled", "504")),
        completed_s - 9,
        completed_s,
        completed_s - 8,
        completed_s - rng.random(),
        "prefill-0",
        "decode-0",
        rng.randrange(2),
        R1.charge(completed_us, hit, miss, out),
    )


class FlakyStore(Store):
    """Store that fails a share of its writes, before or after they took effect; the writer cannot
    distinguish the two.
    """

    def __init__(self, url: str, rng: random.Random, outages: float) -> None:
        super().__init__(url)
        self._rng = rng
        self._outages = outages

    def write(self, facts: PackedFacts) -> Written:
        if self._rng.random() < self._outages / 2:
            raise StoreDown("the test says so")
        written = super().write(facts)
        if self._rng.random() < self._outages / 2:
            raise StoreDown("the answer is lost, says the test")
        return written


def say(facts: Sequence[Fact]) -> None:
    """Print ids in one write, so that a kill leaves the line whole or absent."""
    ids = [fact.request_id for fact in facts if isinstance(fact, RequestFact)]
    if ids:
        os.write(1, (" ".join(("A", *ids)) + "\n").encode())


def main() -> int:
    url, seed, name = ledger_url(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    limit = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    rng = random.Random(seed)
    # The store draws in the writer's thread, from a generator of its own. The printed ids thus stay
    # a function of the seed.
    store = FlakyStore(url, random.Random(~seed), float(sys.argv[5]) if len(sys.argv) > 5 else 0.0)
    writer = LedgerWriter(
        store,
        LedgerOutbox(outbox_of(url)),
        on_kept=say,
        linger_s=rng.choice((0.0, 0.002)),
        retry_s=(0.001, 0.02),
    )
    writer.start()
    number = 0
    while not limit or number < limit:
        for _ in range(rng.randrange(1, 30)):
            writer.add(fact_of(f"{name}-{number}"))
            number += 1
            if rng.random() < 0.2:
                writer.add(fact_of(f"{name}-{rng.randrange(number)}"))
            if rng.random() < 0.2:
                writer.add(fact_of(f"both-{rng.randrange(NUM_BOTH)}"))
        time.sleep(rng.choice((0.0, 0.001, 0.005)))
    writer.close(60.0)
    counts = writer.counts
    assert counts.num_lost == counts.num_refused == counts.num_waiting == 0, counts
    return 0
