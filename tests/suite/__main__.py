"""Run the suite at a level, show its progress, and end with skipped tests and costs.

    python -m tests.suite test                        9 minutes on two quiet cores
    python -m tests.suite more                        tests that `test` leaves out, and larger campaigns
    python -m tests.suite all                         everything at full sizes: hours
    python -m tests.suite test --changed main         tests of files that changed since main, and of
                                                      rooms that may import them
    python -m tests.suite test --without promtool     as on a machine without promtool
    python -m tests.suite test tests/dist -k drafts   options and paths are pytest's

The last line counts passed, failed and skipped tests. Output of each part: .pytest_cache/PART.log.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from hadal.progress import Bar
from tests import levels, needs
from tests.fresh import ANSWERS, RUN, VARIABLE
from tests.suite.budget import Budget, Loop
from tests.suite.changed import tests_of_changes
from tests.suite.events import Event
from tests.suite.parts import CACHE, NOTHING_TO_RUN, SOME_FAILED, Part, Running, parts
from tests.suite.summary import Summary, chosen_options

PERIOD_S = 0.2
OVER_BUDGET = "HADAL_HOLD_BUDGET"
"""Environment variable: if set, a folder above SLACK times its budget fails a run of all tests."""


def main(arguments: Sequence[str]) -> int:
    """Run the parts at the same time; return the worst exit code."""
    asked, rest = _parser().parse_known_args(arguments)
    options, paths = chosen_options(rest)
    console = suite_console()
    is_chosen = bool(paths or asked.changed)
    if asked.changed:
        paths = tests_of_changes(asked.changed)
        console.print(f"{len(paths)} files of tests for what changed since {asked.changed}")
        if not paths:
            return 0
    CACHE.mkdir(exist_ok=True)
    summary, budget = Summary(), Budget(asked.level)
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hadal-suite-") as folder, Loop() as loop:
        environment = _environment(asked, Path(folder))
        with _running(parts(paths), options, environment) as running:
            _follow(running, summary, budget, console)
            codes = {one.part.name: one.poll() or 0 for one in running}
    for one in running:
        _show(one, codes[one.part.name], console)
    tables = [summary.table_left_out(), summary.table_slow()]
    processor, over = summary.table_processor(budget, loop.mean_s)
    for table in (*tables, processor):
        if table.row_count:
            console.print(table)
    console.print(
        f"{(time.monotonic() - start_s) / 60:.1f} min at level {asked.level}; {summary.num_servers} servers "
        f"started; one unit is {loop.mean_s:.3f} s of a processor; {VARIABLE}={RUN} draws the same seeds"
    )
    if over and os.environ.get(OVER_BUDGET) and not is_chosen:
        console.print(
            f"Above {Budget.SLACK:.0f} times the budget: {', '.join(over)}: see tests/budget.toml"
        )
        codes["budget"] = SOME_FAILED
    if asked.write_budget:
        used = {folder: s / loop.mean_s for folder, s in summary.folder_to_s.items()}
        Budget.write(asked.level, used)
    print(summary.closing_line(), flush=True)
    return max(0 if code == NOTHING_TO_RUN else code for code in codes.values())


def suite_console() -> Console:
    """Return the suite's console. Names of tests have brackets, so markup is off."""
    width = None if sys.stdout.isatty() else 140
    return Console(width=width, highlight=False, markup=False)


def _environment(asked: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Return variables for the processes of all parts. `folder` lasts as long as the run."""
    answers, programs = folder / "answers", folder / "programs"
    answers.mkdir()
    made = {VARIABLE: RUN, ANSWERS: str(answers), levels.VARIABLE: asked.level}
    if asked.without:
        folder.chmod(0o755)  # PostgreSQL runs as another user, which must find programs too.
        programs.mkdir()
        made |= {"PATH": needs.hide(asked.without, programs), needs.WITHOUT: asked.without}
    return made


@contextlib.contextmanager
def _running(
    chosen: Sequence[Part], options: Sequence[str], environment: dict[str, str]
) -> Iterator[list[Running]]:
    """Start a process for each part and yield them; end them with the block."""
    running = [Running(part, options, environment) for part in chosen]
    try:
        yield running
    finally:
        for one in running:
            one.end()


def _follow(running: Sequence[Running], summary: Summary, budget: Budget, console: Console) -> None:
    """Read the parts' events until all have ended, and show their progress."""
    start_s = time.monotonic()
    with Bar("tests", 1.0, console=console) as bar:
        is_last = False
        while not is_last:
            is_last = all(one.poll() is not None for one in running)
            for one in running:
                for line in one.read():
                    event: Event = msgspec.json.decode(line, type=Event)
                    if failed := summary.note(one.part.name, event):
                        bar.print_above(f"FAILED {failed}".encode())
            text, share = summary.progress(budget, time.monotonic() - start_s)
            bar.update(text, done=share)
            time.sleep(PERIOD_S)


def _show(one: Running, code: int, console: Console) -> None:
    """Print a part's output if a test failed, else only its last line."""
    text = one.output.read_text(errors="replace")
    if code in (0, NOTHING_TO_RUN):
        text = "\n".join(text.splitlines()[-1:])
    console.print(f"{one.part.name}: exit code {code}")
    print(text, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m tests.suite",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("level", choices=levels.LEVELS)
    parser.add_argument(
        "--changed", metavar="REF", default="", help="only tests of what changed since this commit"
    )
    parser.add_argument(
        "--without", choices=tuple(needs.NEEDS), default="", help="as if this tool were missing"
    )
    parser.add_argument(
        "--write-budget", action="store_true", help="make what this run uses the level's budget"
    )
    return parser


def _interrupt(*_: object) -> None:
    """Raise KeyboardInterrupt, so that SIGTERM ends the parts like Ctrl-C."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)  # Also if a shell in the background ignored it.
    sys.exit(main(sys.argv[1:]))
