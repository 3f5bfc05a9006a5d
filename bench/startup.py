"""How long it takes from typing `hadal serve` to the first answer, on the model that ships.

    python -m bench.startup [--quick]

Twice: with compiled kernels in the cache, as on every start but the first, and with an empty cache.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence

from rich.console import Console

from bench.checkpoints import SHIPPED
from bench.server import launched, request

BODY = {
    "model": SHIPPED.name,
    "messages": [{"role": "user", "content": "What is 12 + 30?"}],
    "temperature": 0,
}
TIMEOUT_S = 180.0
AIM_S = 15.0


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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.startup", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="one start, and none with an empty cache"
    )
    options = parser.parse_args(arguments)
    console = Console()
    console.print("[bold]start-up[/bold]: from the command to the first answer")
    seconds_to_first_answer()  # Fills the caches; not counted.
    times = [seconds_to_first_answer() for _ in range(1 if options.quick else 5)]
    mark = "[green]✓[/green]" if statistics.median(times) <= AIM_S else "[red]✗[/red]"
    shown = ", ".join(f"{seconds:.1f}" for seconds in times)
    console.print(
        f"  warm: {statistics.median(times):.1f} s {mark} [dim](aim {AIM_S:.0f} s; {shown})[/dim]"
    )
    if not options.quick:
        with tempfile.TemporaryDirectory(prefix="hadal-b-") as cache:
            first = seconds_to_first_answer({"HADAL_CACHE_DIR": cache})
        console.print(f"  first ever, kernels compiled on the way: {first:.1f} s")


if __name__ == "__main__":
    main()
