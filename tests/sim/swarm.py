"""Run thousands of seeds against the whole control plane, in small worlds checked at every event.

    python -m tests.sim.swarm --seeds 10000 --jobs 2      many seeds: a progress bar, and a table of what they reached
    python -m tests.sim.swarm --seed 4711                 one seed again: its scene and its counts
    python -m tests.sim.swarm --seed 4711 --shrink        the features and faults that it takes to fail

A seed and a commit determine a run: the digest of all that clients received is printed, and is the
same in every process.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tests.sim.swarm_policies import guarded
from tests.sim.swarm_scene import FAULTS, FEATURES, Scene, draw
from tests.sim.swarm_world import SwarmWorld

LIMIT_S = 200.0
"""Simulated seconds within which all faults end, and then all requests."""
FLEET_LIMIT_S = 900.0
"""Simulated seconds instead of LIMIT_S with a fleet: a lost start is noticed after ten minutes."""
WALL_S = 300
"""Real seconds after which the stack is shown, for a role that loops for ever within one event."""
SUMMED = ("moves", "preemptions", "faults")
"""Counts that the last line repeats: a swarm without them proves little."""
_BATCH = 20
_TOLD = 200
"""Number of seeds per line of progress; such lines replace the progress bar if the output is a file."""


@dataclass
class Found:
    """Results of seeds."""

    num_seeds: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    """Event -> how often it was seen."""
    runs: Counter[str] = field(default_factory=Counter)
    """Event, feature or fault -> number of seeds in which it was seen, or was on."""
    errors: dict[int, str] = field(default_factory=dict)
    digests: dict[int, int] = field(default_factory=dict)

    def add(self, other: Found) -> None:
        """Add the results of other seeds."""
        self.num_seeds += other.num_seeds
        self.seen += other.seen
        self.runs += other.runs
        self.errors |= other.errors
        self.digests |= other.digests


def run(scene: Scene) -> tuple[SwarmWorld, Counter[str]]:
    """Run a scene to its end and check the final state. Errors name the simulated time."""
    with guarded() as asked:
        world = SwarmWorld(scene)
        try:
            world.run_to_the_end(FLEET_LIMIT_S if world.has_fleet else LIMIT_S)
            if world.has_fleet:
                # A unit that starts late may still receive messages for its earlier process.
                world.clock.run(
                    world.clock.now() + FLEET_LIMIT_S,
                    lambda: world.is_at_rest() and world.is_over(),
                )
                assert world.is_at_rest(), f"the fleet does not rest: {world.fleet.counts()}"
            world.verify_end()
        except Exception as error:
            error.add_note(f"at {world.clock.now():.6f} s; repeat: {command(scene.seed)}")
            raise
    return world, asked


def run_seed(seed: int) -> SwarmWorld:
    """Return the world of a seed, at its end."""
    return run(draw(seed))[0]


def command(seed: int) -> str:
    """Return the command that repeats a seed."""
    return f"python -m tests.sim.swarm --seed {seed}"


def run_all(seeds: Iterable[int]) -> Found:
    """Run seeds one after another, failing ones included."""
    found = Found()
    for seed in seeds:
        scene = draw(seed)
        faulthandler.dump_traceback_later(WALL_S, exit=False)
        try:
            world, asked = run(scene)
            seen = world.count() + asked
            found.digests[seed] = world.digest
        except Exception:
            seen = Counter()
            found.errors[seed] = traceback.format_exc()
        finally:
            faulthandler.cancel_dump_traceback_later()
        found.num_seeds += 1
        found.seen += seen
        found.runs.update(set(seen))
        found.runs.update(f"on: {name}" for name in scene.on)
    return found


def shrink(seed: int) -> frozenset[str]:
    """Return features and faults that can be off together while the seed still fails."""
    out: frozenset[str] = frozenset()
    for name in (*FAULTS, *FEATURES):
        if name in draw(seed).on and _fails(draw(seed, out | {name})):
            out |= {name}
    return out


def _fails(scene: Scene) -> bool:
    try:
        run(scene)
    except Exception:
        return True
    return False


def _batches(first: int, num: int) -> Iterator[range]:
    for start in range(first, first + num, _BATCH):
        yield range(start, min(start + _BATCH, first + num))


def run_many(first: int, num: int, jobs: int, console: Console) -> Found:
    """Run `num` seeds from `first` on, in `jobs` processes. Print a failing seed when it fails."""
    found = Found()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress, ProcessPoolExecutor(jobs) as processes:
        task = progress.add_task("seeds", total=num)
        for future in as_completed(
            [processes.submit(run_all, batch) for batch in _batches(first, num)]
        ):
            part = future.result()
            found.add(part)
            progress.update(
                task, advance=part.num_seeds, description=f"seeds, {len(found.errors)} failed"
            )
            if not console.is_terminal and found.num_seeds % _TOLD == 0:
                console.print(f"{found.num_seeds} of {num} seeds, {len(found.errors)} failed")
            for seed, error in part.errors.items():
                console.print(f"{_reason(error)}\n{command(seed)}", markup=False)
    return found


def _reason(trace: str) -> str:
    """Return the line of a traceback that names the error."""
    return [line for line in trace.splitlines() if line and not line.startswith((" ", "at "))][-1]


def table_of(found: Found) -> Table:
    """Return a table of what the seeds reached."""
    summed = ", ".join(f"{found.seen[what]} {what} in {found.runs[what]} seeds" for what in SUMMED)
    title = f"{found.num_seeds} seeds, {len(found.errors)} failed"
    table = Table("what", "seeds", "in all", title=title, caption=summed)
    for name in sorted(found.runs):
        table.add_row(
            name, str(found.runs[name]), str(found.seen[name]) if name in found.seen else ""
        )
    for name in sorted({f"on: {one}" for one in (*FEATURES, *FAULTS)} - found.runs.keys()):
        table.add_row(name, "0", "")
    return table


def tell_one(seed: int, console: Console, *, is_shrunk: bool, is_traced: bool) -> bool:
    """Run one seed and print its scene and counts. Return whether it ended well."""
    scene = draw(seed)
    if is_shrunk:
        out = shrink(seed)
        scene = draw(seed, out)
        console.print(f"without: {', '.join(sorted(out))}", markup=False)
    console.print(f"seed {seed}: {', '.join(sorted(scene.on))}\n{scene}", markup=False)
    try:
        if is_traced:
            SwarmWorld._arrive = _traced(SwarmWorld._arrive)  # type: ignore[method-assign]
        world, asked = run(scene)
    except Exception:
        console.print(traceback.format_exc(), markup=False)
        return False
    for name, num in sorted((world.count() + asked).items()):
        console.print(f"{num:8} {name}", markup=False)
    console.print(f"digest {world.digest:08x} at {world.clock.now():.6f} s")
    return True


def _traced(arrive):  # type: ignore[no-untyped-def]
    def told(self: SwarmWorld, to: str, message: object, life: int) -> None:
        print(f"{self.clock.now():12.6f} -> {to:12} {str(message)[:200]}")
        arrive(self, to, message, life)

    return told


def main(arguments: list[str]) -> int:
    """Run the command. Return 1 if any seed failed."""
    parser = argparse.ArgumentParser(
        "python -m tests.sim.swarm", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--seeds", type=int, default=10_000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument(
        "--shrink", action="store_true", help="leave out of it what it does not take to fail"
    )
    parser.add_argument("--trace", action="store_true", help="print every message of it")
    options = parser.parse_args(arguments)
    console = Console()
    if options.seed is not None:
        return int(
            not tell_one(options.seed, console, is_shrunk=options.shrink, is_traced=options.trace)
        )
    found = run_many(options.first, options.seeds, options.jobs, console)
    console.print(table_of(found))
    for seed in sorted(found.errors):
        console.print(command(seed), markup=False)
    return int(bool(found.errors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
