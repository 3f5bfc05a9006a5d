"""The ledger's figures of LOG.md and docs/ledger.md: what a fact costs the gateway, how fast facts
are written, how soon they are durable, how fast a day is read, how large a row is. `python -m bench
ledger [--quick]`.

The database is SQLite in a temporary folder (TMPDIR), every commit flushed, written by the thread
that `hadal serve` has.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console
from rich.table import Table

from hadal.core.facts import Fact, NodesFact, PackedFacts, RequestFact, micros, sum_kv_tokens
from hadal.runtime.ledger.outbox import LedgerOutbox
from hadal.runtime.ledger.store import Store, ledger_url, outbox_of
from hadal.runtime.ledger.writer import LINGER_S, MAX_BATCH, LedgerWriter
from hadal.stats.prices import DAY_S, R1
from hadal.stats.report import report
from hadal.stats.tally import Columns, Tally

START_S = 1_740_628_800.0
_DAY_US = (micros(START_S), micros(START_S + DAY_S))
_KEPT_S = 120.0


def make_facts(number: int, seed: int = 1) -> list[RequestFact]:
    """A day's, in the order of their ends, with ids and names like the gateway's."""
    rng = np.random.default_rng(seed)
    columns = zip(
        *(
            rng.integers(low, high, number).tolist()
            for low, high in ((0, 5000), (1, 5000), (1, 2000), (0, 10))
        ),
        (START_S + np.sort(rng.random(number)) * DAY_S).tolist(),
        strict=True,
    )
    ids = rng.bytes(16 * number).hex()
    return [
        RequestFact(
            f"chatcmpl-{ids[32 * index : 32 * (index + 1)]}",
            f"t-{tenant:010x}",
            "deepseek-r1",
            hit,
            miss,
            out,
            sum_kv_tokens(hit + miss, out),
            "stop",
            completed_s - 0.05 * out - 1.0,
            completed_s,
            completed_s - 0.05 * out,
            completed_s,
            "prefill-0",
            "decode-0",
            0,
            R1.charge(micros(completed_s), hit, miss, out),
        )
        for index, (hit, miss, out, tenant, completed_s) in enumerate(columns)
    ]


class Durable:
    """When each fact was said to be durable."""

    def __init__(self) -> None:
        self.id_to_s: dict[str, float] = {}
        self._changed = threading.Condition()

    def __call__(self, facts: Sequence[Fact]) -> None:
        now_s = time.perf_counter()
        with self._changed:
            self.id_to_s.update(
                (fact.request_id, now_s) for fact in facts if isinstance(fact, RequestFact)
            )
            self._changed.notify_all()

    def wait_for(self, number: int) -> None:
        """Until so many are. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.id_to_s) >= number, _KEPT_S):
                raise TimeoutError(
                    f"{len(self.id_to_s)} of {number} facts are durable after {_KEPT_S:g} s"
                )


def written(
    folder: Path, facts: Sequence[RequestFact], pause_s: float
) -> tuple[float, list[float], float]:
    """Give facts to a writer, one every `pause_s`. Returns (seconds in `add` of each, until each
    was durable, facts/s from the first `add` until all were).
    """
    folder.mkdir()
    url = ledger_url(str(folder / "ledger.sqlite"))
    durable = Durable()
    writer = LedgerWriter(Store(url), LedgerOutbox(outbox_of(url)), on_kept=durable)
    writer.start()
    added_s: list[float] = []
    in_add_s = 0.0
    start_s = time.perf_counter()
    for index, fact in enumerate(facts):
        if pause_s:
            time.sleep(max(0.0, start_s + index * pause_s - time.perf_counter()))
        added_s.append(time.perf_counter())
        writer.add(fact)
        in_add_s += time.perf_counter() - added_s[-1]
    durable.wait_for(len(facts))
    took_s = time.perf_counter() - start_s
    waits_s = [
        durable.id_to_s[fact.request_id] - at_s for fact, at_s in zip(facts, added_s, strict=True)
    ]
    counts = writer.counts
    writer.close(_KEPT_S)
    if counts.num_written != len(facts):
        raise RuntimeError(f"{counts} of {len(facts)} facts")
    return in_add_s / len(facts), waits_s, len(facts) / took_s


def read_day(folder: Path, facts: Sequence[RequestFact]) -> tuple[float, float]:
    """Write a day and read it as `hadal report` does. Returns (bytes a row, seconds)."""
    folder.mkdir()
    path = folder / "ledger.sqlite"
    store = Store(ledger_url(str(path)))
    store.prepare()
    empty = path.stat().st_size
    for first in range(0, len(facts), MAX_BATCH):
        store.write(PackedFacts(tuple(facts[first : first + MAX_BATCH])))
    store.close()  # The log beside the file goes into it.
    num_bytes = path.stat().st_size - empty
    start_s = time.perf_counter()
    tally = store.read(*_DAY_US).tally
    took_s = time.perf_counter() - start_s
    store.close()
    if sum(counts.num_requests for _, counts in tally) != len(facts):
        raise RuntimeError("a fact is missing")
    return num_bytes / len(facts), took_s


def columns_of(facts: Sequence[RequestFact]) -> Columns:
    """The same facts as arrays."""

    def ints(value: Callable[[RequestFact], int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array([value(fact) for fact in facts], np.int64)

    tenants = sorted({fact.tenant for fact in facts})
    number = {tenant: at for at, tenant in enumerate(tenants)}
    return Columns(
        ints(lambda f: micros(f.completed_s)),
        ints(lambda f: micros(f.first_token_s or 0.0)),
        ints(lambda f: micros(f.last_token_s or 0.0)),
        ints(lambda f: f.tokens_hit),
        ints(lambda f: f.tokens_miss),
        ints(lambda f: f.tokens_out),
        ints(lambda f: f.kv_tokens),
        ints(lambda f: 0),
        ints(lambda f: number[f.tenant]),
        (facts[0].model,),
        tenants,
    )


def seconds_of(work: Callable[[], object]) -> float:
    """How long it takes."""
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench ledger", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the day")
    num_day = 100_000 if parser.parse_args(arguments).quick else 1_000_000
    facts = make_facts(num_day)
    table = Table("", "figure", "what", title="The ledger", title_justify="left")
    with TemporaryDirectory() as name:
        folder = Path(name)
        add_s, _, burst_per_s = written(folder / "burst", facts[:30_000], 0.0)
        table.add_row("add", f"{add_s * 1e6:.1f} us", "of the caller's time, in a burst of 30,000")
        table.add_row(
            "burst", f"{burst_per_s:,.0f} facts/s", "from the first add until all were durable"
        )
        add_s, waits_s, _ = written(folder / "paced", facts[:1000], 0.005)
        centiles = statistics.quantiles(waits_s, n=100)
        table.add_row("add", f"{add_s * 1e6:.1f} us", "one every 5 ms, 1,000 of them")
        what = f"median of these; up to {LINGER_S * 1e3:g} are waited for company"
        table.add_row("durable after", f"{centiles[49] * 1e3:.0f} ms", what)
        table.add_row("", f"{centiles[98] * 1e3:.0f} ms", "p99")
        row_bytes, read_s = read_day(folder / "day", facts)
        table.add_row("a row", f"{row_bytes:.0f} bytes", f"of {num_day:,}, their index included")
        table.add_row("reading", f"{read_s:.2f} s", f"a day of {num_day:,} rows into counters")
    columns, tally = columns_of(facts), Tally()
    together_s = seconds_of(lambda: tally.add_columns(columns))
    table.add_row("in memory", f"{num_day / together_s / 1e6:.1f} M facts/s", "from columns")
    some = facts[:100_000]
    single_s = seconds_of(lambda: Tally().add_facts(some))
    table.add_row("", f"{len(some) / single_s / 1e6:.2f} M facts/s", "one by one")
    nodes = [
        NodesFact(f"u{at}", "e", "decode", 8, 8, START_S, START_S + DAY_S) for at in range(1000)
    ]
    report_s = seconds_of(lambda: report(tally, nodes, *_DAY_US))
    table.add_row("report", f"{report_s:.2f} s", "by hour, over 1,000 units")
    Console().print(table)


if __name__ == "__main__":
    main()
