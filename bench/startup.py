"""How long it takes from typing `hadal serve` to the first answer, until a killed rank is back in
its unit, and until a server has ended, on the model that ships.

    python -m bench.startup [--quick]

The first answer twice: with compiled kernels in the cache, as on every start but the first, and
with an empty cache.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console

from bench.checkpoints import ROOT, SHIPPED
from bench.server import Running, launched, request

BODY = {
    "model": SHIPPED.name,
    "messages": [{"role": "user", "content": "What is 12 + 30?"}],
    "temperature": 0,
}
TIMEOUT_S = 180.0
ANSWER_AIM_S = 2.0
READY_AIM_S = 2.5
RANKED_AIM_S = 4.0
BACK_AIM_S = 1.5
UNIT = "decode-0"
FORMATION = f'hadal_unit_formation{{unit="{UNIT}"}}'
NUM_RANKS = f'hadal_unit_ranks{{unit="{UNIT}"}}'
REST_S = 2.0
"""Between two kills: a rank that dies again at once is started later."""


def seconds_to_first_answer(environment: Mapping[str, str] | None = None) -> float:
    """Start a server and ask until it answers; the whole answer counts, as `curl` would show it."""
    with launched(environment=environment) as running:
        while time.monotonic() < running.started_s + TIMEOUT_S:
            with contextlib.suppress(OSError, RuntimeError):  # Not listening yet, or no status yet.
                status, _ = request(running.address, "POST", "/v1/chat/completions", BODY)
                if status == 200:
                    return time.monotonic() - running.started_s
            if running.process.poll() is not None:
                break
            time.sleep(0.02)
        raise RuntimeError(f"no answer:\n{running.log.read_text(errors='replace')[-2000:]}")


def wait_for(condition: Callable[[], bool], running: Running, what: str) -> None:
    """Look again and again. Raises RuntimeError where the server ends or TIMEOUT_S pass."""
    until_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until_s and running.process.poll() is None:
        with contextlib.suppress(OSError, RuntimeError):  # Not listening yet, or no status yet.
            if condition():
                return
        time.sleep(0.01)
    raise RuntimeError(f"{what} not seen:\n{running.log.read_text(errors='replace')[-2000:]}")


def ready_and_end(deployment: str) -> tuple[float, float]:
    """Seconds from the command until /health answers 200, and from SIGTERM to the end."""
    with launched(deployment) as running:
        wait_for(lambda: bool(running.get("/health")), running, "a ready server was")
        ready_s = time.monotonic() - running.started_s
        begun_s = time.monotonic()
        running.process.terminate()
        running.process.wait(TIMEOUT_S)
        return ready_s, time.monotonic() - begun_s


def seconds_until_ranks_are_back(deployment: str, num_kills: int) -> list[float]:
    """From `kill -9` of a decode rank until its unit steps with all of its ranks again, by rank in
    turn.
    """
    seconds = []
    with launched(deployment) as running:
        wait_for(lambda: bool(running.get("/health")), running, "a ready server was")
        num_ranks = running.metrics()[NUM_RANKS]
        for number in range(num_kills):
            killed = running.metrics()[FORMATION]
            pids = running.pids()
            begun_s = time.monotonic()
            os.kill(pids[f"{UNIT}.{number % int(num_ranks)}"], signal.SIGKILL)

            def is_whole(killed: float = killed) -> bool:
                now = running.metrics()
                return now[FORMATION] > killed and now[NUM_RANKS] == num_ranks

            wait_for(is_whole, running, "a whole unit was")
            seconds.append(time.monotonic() - begun_s)
            time.sleep(REST_S)
    return seconds


def show(console: Console, what: str, seconds: Sequence[float], aim_s: float | None) -> None:
    """One line: the median, beside its aim if it has one."""
    median_s = statistics.median(seconds)
    each = ", ".join(f"{one:.2f}" for one in seconds)
    if aim_s is None:
        console.print(f"  {what}: {median_s:.2f} s [dim]({each})[/dim]")
        return
    mark = "[green]✓[/green]" if median_s <= aim_s else "[red]✗[/red]"
    console.print(f"  {what}: {median_s:.2f} s {mark} [dim](aim {aim_s:g} s; {each})[/dim]")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.startup", description=__doc__.split("\n\n", 1)[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="one start of each, and none with an empty cache"
    )
    options = parser.parse_args(arguments)
    console = Console()
    console.print("[bold]start-up[/bold]: from the command, caches warm")
    seconds_to_first_answer()  # Fills the caches; not counted.
    number = 1 if options.quick else 5
    ranked = (ROOT / "configs" / "laptop_ep.toml").read_text(encoding="utf-8")
    show(console, "first answer", [seconds_to_first_answer() for _ in range(number)], ANSWER_AIM_S)
    for what, deployment, aim_s in (
        ("hadal serve", "", READY_AIM_S),
        ("laptop_ep", ranked, RANKED_AIM_S),
    ):
        both = [ready_and_end(deployment) for _ in range(number)]
        show(console, f"{what} ready", [ready_s for ready_s, _ in both], aim_s)
        show(console, f"{what} ended after SIGTERM", [end_s for _, end_s in both], None)
    backs = seconds_until_ranks_are_back(ranked, 2 * number)
    show(console, "a killed rank back in its unit", backs, BACK_AIM_S)
    if not options.quick:
        with tempfile.TemporaryDirectory(prefix="hadal-b-") as cache:
            first = seconds_to_first_answer({"HADAL_CACHE_DIR": cache})
        console.print(f"  first answer ever, kernels compiled on the way: {first:.1f} s")


if __name__ == "__main__":
    main()
