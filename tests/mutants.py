"""Change the code at random, one place at a time, and check whether a test notices. This shows how
strong a suite is, and whether two suites are equally strong.

    python -m tests.mutants                                    60 mutants of this tree
    python -m tests.mutants --checkout ../old --checkout .     60 mutants that both trees have, in both
    python -m tests.mutants --list --seed 7                    the mutants that would be drawn
    python -m tests.mutants --resume                           continue from the results in --out
    python -m tests.mutants --resume --again survived          and try the survivors once more

Each checkout needs its own .venv (`make setup`). The mutants are applied one by one to a copy of it
in a temporary folder; the checkout itself is only read. Tests run in one process, in four scopes,
until one fails:

    known  the test that noticed the mutant in another checkout
    room   unit tests of the mutant's room
    rest   all other unit tests and tests/sim
    live   a few files that start servers, for mutants of runtime and gateway

A tree with levels (tests/levels.py) has its tests run by level: `test` first, then `more` for the
mutants that `test` did not notice.

A scope first runs once without a mutant, to learn which tests execute which mutants' statements.
Each mutant then has only those tests, quickest files first, up to --cap-s seconds of them. Failures
in rooms with clocks and processes must repeat to count. Two trees take two hours on two cores;
`nice` leaves the machine to other work.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests import levels
from tests.fresh import VARIABLE
from tests.mutants_points import (
    PROBE,
    ROOMS,
    Place,
    Point,
    draw,
    find,
    mutated,
    points_of,
    probed,
    read_tree,
)
from tests.mutants_probe import EVERYWHERE
from tests.suite.changed import modules_of

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LIVE = ("test_openai_client.py", "test_malformed.py", "test_handover.py", "test_supervision.py")
TIMED = ("runtime", "gateway")
"""Rooms with tests that depend on clocks and start processes."""
SLOWER = 5
"""A run of tests counts as hanging after START_S, one test's timeout, and SLOWER times the tests'
duration without a mutant.
"""
START_S = 60.0
"""Seconds allowed for the rest of a pytest run, besides the tests."""
LEARNING_S = 3600.0
NEVER_S = 1e9
_LEFT_OUT = (".git", ".venv", ".peers", ".pytest_cache", ".mypy_cache", ".ruff_cache", "build")


@dataclass(frozen=True)
class Options:
    """Limits in seconds: `cap_s` for the tests of a mutant in one scope, `file_s` for the tests of a
    file to learn from, `timeout_s` for one test.
    """

    cap_s: float
    file_s: float
    timeout_s: float


@dataclass(frozen=True)
class Outcome:
    """Result of a pytest run."""

    failed: str | None
    """First failed test, or a reason if no test is to blame; None if all passed."""
    report: dict[str, Any]


class Copy:
    """A private copy of a checkout with code that may be changed."""

    def __init__(self, checkout: Path, level: str, folder: Path, options: Options) -> None:
        self.folder = folder
        self._level = level
        self._checkout = checkout
        self._options = options
        self._num_changed = 0
        shutil.copytree(checkout, folder, symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        for name in (PROBE, "mutants_plugin"):
            shutil.copy(HERE / f"{name}.py", folder / "src")

    @contextmanager
    def changed(self, path_to_text: dict[Path, str]) -> Iterator[None]:
        """Within the block, replace these files of the copy; restore them after it."""
        for path, text in path_to_text.items():
            ours = self.folder / path.relative_to(self._checkout)
            ours.write_text(text, encoding="utf-8")
            self._num_changed += 1
            os.utime(ours, (self._num_changed,) * 2)  # No compiled file has this time.
        try:
            yield
        finally:
            for path in path_to_text:
                shutil.copy2(path, self.folder / path.relative_to(self._checkout))

    def pytest(
        self,
        files: list[str],
        tests: list[str] | None,
        limit_s: float,
        *,
        is_first: bool = True,
        file_s: float = NEVER_S,
    ) -> Outcome:
        """Run `tests`, or all tests of the files if None; `is_first`: stop at the first failure.
        `limit_s`: seconds after which the run is killed. `file_s`: seconds after which the rest of a
        file is skipped.
        """
        shutil.rmtree(self.folder / ".hypothesis", ignore_errors=True)
        shutil.rmtree(self.folder / "src" / f"{PROBE}.hits", ignore_errors=True)
        report = self.folder / "report.json"
        report.unlink(missing_ok=True)
        asked = {"tests": tests, "report": str(report), "file_s": file_s}
        command = [
            *(self._checkout / ".venv" / "bin" / "python", "-m", "pytest", "-q"),
            *("-p", "no:cacheprovider", "-p", "mutants_plugin", "-m", "not full"),
            *("--timeout", str(self._options.timeout_s), *(("-x",) if is_first else ())),
            *files,
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": f"{self.folder / 'src'}:{self.folder}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "MUTANTS_ASKED": json.dumps(asked),
            VARIABLE: "14",
            levels.VARIABLE: self._level,
        }
        with (self.folder / "output.txt").open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                self._end_all()
                process.wait()
        found = json.loads(report.read_text()) if report.exists() else {}
        if code is None:
            return Outcome(f"more than {limit_s:.0f} s", found)
        failed = found.get("failed") or []
        return Outcome((failed or [None if code in (0, 5) else f"pytest: {code}"])[0], found)

    def output(self) -> str:
        """Return the last lines of the last run."""
        return "\n".join(
            (self.folder / "output.txt").read_text(errors="replace").splitlines()[-30:]
        )

    def _end_all(self) -> None:
        """Kill all processes of the copy, found by their environment: a killed test's server runs on."""
        mark = f"{self.folder / 'src'}".encode()
        for process in Path("/proc").iterdir():
            try:
                if process.name.isdigit() and mark in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
            except OSError:
                continue  # It has ended, or belongs to another user.


@dataclass(frozen=True)
class Run:
    """Tests of one checkout, or of one of its levels."""

    checkout: Path
    level: str

    @property
    def name(self) -> str:
        return f"{self.checkout.name} {self.level}".strip()


def runs_of(checkout: Path) -> list[Run]:
    """Return the runs of a checkout, the cheapest first."""
    has_levels = (checkout / "tests" / "levels.py").is_file()
    return [Run(checkout, level) for level in (("test", "more") if has_levels else ("",))]


class Trial:
    """The mutants in one run. All results are kept in `state`, a JSON value."""

    def __init__(
        self,
        run: Run,
        points: list[Point],
        state: dict[str, Any],
        killers: dict[int, str],
        options: Options,
        console: Console,
    ) -> None:
        """Prepare this checkout's mutants. `killers`: mutant -> test that noticed it in another run."""
        self._name = run.name
        self._level = run.level
        self._killers = killers
        self._checkout = run.checkout
        self._points = points
        self._state = state
        self._options = options
        self._console = console
        tree = read_tree(run.checkout)
        self._places: dict[int, Place] = {}
        for number, point in enumerate(points):
            if place := find(tree, point):
                self._places[number] = place

    def run(self, save: Any) -> None:
        """Run all scopes without a result; call `save()` after every step."""
        results = self._state.setdefault("results", {})
        for number, point in enumerate(self._points):
            if number not in self._places and str(number) not in results:
                results[str(number)] = {"place": "not in this tree", "done": True}
                self._tell(f"{number:2} {point.function}: not in this tree")
        with tempfile.TemporaryDirectory(prefix="hadal-mutants-") as folder:
            copied = Copy(self._checkout, self._level, Path(folder) / "copy", self._options)
            for scope in ("known", "room", "rest", "live"):
                left = [
                    number
                    for number in self._places
                    if not (has := results.get(str(number), {})).get("done")
                    and scope not in has.get("tried", {})
                    and (scope != "live" or self._points[number].room in TIMED)
                ]
                if scope == "known":
                    left = self._check_killers(copied, left)
                else:
                    self._learn(copied, scope, left)
                save()
                for number in left:
                    self._try(copied, scope, number)
                    save()
        for number in self._places:
            results[str(number)]["done"] = True
        save()

    def leave_out(self, mutants: set[int]) -> None:
        """Leave out mutants that a cheaper level has noticed."""
        results = self._state.setdefault("results", {})
        for number in mutants & self._places.keys():
            results[str(number)] = {"place": "noticed by a lower level", "done": True}
            del self._places[number]

    def noticed(self) -> set[int]:
        """Return the mutants that a test of this run noticed."""
        results = self._state["results"].items()
        return {int(number) for number, one in results if one.get("killed_by")}

    def _tell(self, text: str) -> None:
        now = time.strftime("%H:%M:%S")
        self._console.print(f"{now} {self._name}  {text}", markup=False, highlight=False)

    def _reach(self) -> dict[str, Any]:
        """Return what was learned so far: per test its time and executed mutants, and per test file the
        mutants that imports and shared fixtures execute.
        """
        reach: dict[str, Any] = self._state.setdefault(
            "reach", {"learned": {}, "tests": {}, "files": {}}
        )
        return reach

    def _check_killers(self, copied: Copy, mutants: list[int]) -> list[int]:
        """Return the mutants with a killer (a test that noticed it elsewhere) that passes here without mutants."""
        killers = {
            number: name
            for number, name in self._killers.items()
            if number in mutants and (copied.folder / name.partition("::")[0]).is_file()
        }
        if not killers:
            return []
        files = sorted({name.partition("::")[0] for name in killers.values()})
        tests = list(killers.values())
        report = copied.pytest(files, tests, LEARNING_S, is_first=False).report
        passed = {name: test for name, test in report.get("tests", {}).items() if test["ok"]}
        self._reach()["tests"].update(passed)
        self._tell(f"known: {len(passed)} tests noticed mutants in another checkout")
        return [number for number, name in killers.items() if name in passed]

    def _learn(self, copied: Copy, scope: str, mutants: list[int]) -> None:
        """Record which tests of a scope execute which mutants' statements, where that is not known yet."""
        reach = self._reach()
        learned = reach["learned"].setdefault(scope, [])
        mutants = [number for number in mutants if number not in learned]
        if not mutants:
            return
        files = self._files(copied.folder, scope, mutants)
        self._tell(f"{scope}: {len(files)} files say which tests execute {len(mutants)} mutants")
        by_path: dict[Path, list[tuple[int, Place]]] = defaultdict(list)
        for number in mutants:
            place = self._places[number]
            by_path[place.path].append((number, place))
        started_s = time.monotonic()
        with copied.changed({path: probed(path, marked) for path, marked in by_path.items()}):
            file_s = NEVER_S if scope == "live" else self._options.file_s
            report = copied.pytest(files, None, LEARNING_S, is_first=False, file_s=file_s).report
        tests = report.get("tests")
        if not tests:
            raise RuntimeError(f"{scope}: no test was run\n{copied.output()}")
        for name, test in tests.items():
            known = reach["tests"].setdefault(name, {**test, "hits": []})
            known["hits"] += test["hits"]
        for file, hits in report["files"].items():
            reach["files"].setdefault(file, []).extend(hits)
        learned += mutants
        bad = [name for name, test in tests.items() if not test["ok"]]
        self._tell(
            f"{scope}: {len(tests)} tests in {time.monotonic() - started_s:.0f} s; {len(bad)} of "
            f"them failed or were skipped and count for nothing: {', '.join(bad[:5])}"
        )

    def _files(self, folder: Path, scope: str, mutants: list[int]) -> list[str]:
        """Return test files of a scope that load a mutant's module."""
        if scope == "live":
            return [f"tests/dist/{name}" for name in LIVE]
        rooms = [path for room in ROOMS for path in _tests_in(folder / "tests" / "unit" / room)]
        found = rooms
        if scope == "rest":
            found = _tests_in(folder / "tests" / "unit") + _tests_in(folder / "tests" / "sim")
            found = [path for path in found if path not in rooms]
        modules = {_module(self._places[number].path, self._checkout) for number in mutants}
        loads = Imports(folder)
        return [str(path.relative_to(folder)) for path in found if loads.any(path, modules)]

    def _chosen(self, scope: str, number: int) -> tuple[list[str], int]:
        """Return the tests for a mutant, in order, and the number left out by the cap."""
        if scope == "known":
            return [self._killers[number]], 0
        reach = self._reach()
        wide = {file for file, hits in reach["files"].items() if number in hits}
        file_to_tests: dict[str, list[tuple[float, str]]] = defaultdict(list)
        for name, test in reach["tests"].items():
            file = name.partition("::")[0]
            if (
                test["ok"]
                and self._scope_of(number, file) == scope
                and (number in test["hits"] or wide & {file, EVERYWHERE})
            ):
                file_to_tests[file].append((test["s"], name))
        mirrored = f"test_{self._places[number].path.stem}"
        order = sorted(
            file_to_tests,
            key=lambda file: (
                Path(file).stem != mirrored,
                sum(s for s, _ in file_to_tests[file]),
                file,
            ),
        )
        chosen: list[str] = []
        spent_s, num_left_out = 0.0, 0
        for file in order:
            for s, name in sorted(file_to_tests[file]):
                if spent_s + s > self._options.cap_s:
                    num_left_out += 1
                else:
                    spent_s += s
                    chosen.append(name)
        return chosen, num_left_out

    def _scope_of(self, number: int, file: str) -> str:
        if file.startswith("tests/dist/"):
            return "live"
        return "room" if file.startswith(f"tests/unit/{self._points[number].room}/") else "rest"

    def _try(self, copied: Copy, scope: str, number: int) -> None:
        point, place = self._points[number], self._places[number]
        where = f"{place.path.relative_to(self._checkout)}:{place.statement.lineno}"
        result = self._state["results"].setdefault(
            str(number), {"place": where, "killed_by": None, "seconds": 0.0, "tried": {}}
        )
        tests, num_left_out = self._chosen(scope, number)
        started_s = time.monotonic()
        with copied.changed({place.path: mutated(place, point)}):
            killed_by = self._killer(copied, scope, number, tests)
        result["seconds"] = round(result["seconds"] + time.monotonic() - started_s, 1)
        result["tried"][scope] = [len(tests), num_left_out]
        result["killed_by"] = killed_by
        result["done"] = killed_by is not None
        says = f"killed by {killed_by}" if killed_by else f"survives {len(tests)} tests"
        if num_left_out and not killed_by:
            says += f" (the cap left out {num_left_out})"
        self._tell(
            f"{scope} {number:2} {where} {point.function}: {point.kind}: {point.was} -> {point.now}: "
            f"{says}, {result['seconds']:.0f} s"
        )

    def _killer(self, copied: Copy, scope: str, number: int, tests: list[str]) -> str | None:
        """Return the first test that notices the change in the copy, or why a run ended without one to blame;
        None if every test passes.
        """
        reached = self._reach()["tests"]
        while tests:
            limit_s = (
                START_S + self._options.timeout_s + SLOWER * sum(reached[t]["s"] for t in tests)
            )
            files = list(dict.fromkeys(name.partition("::")[0] for name in tests))
            failed = copied.pytest(files, tests, limit_s).failed
            if failed is None or failed not in tests:
                return failed  # No test failed, the run hangs, or a file cannot be imported.
            if scope != "live" and self._points[number].room not in TIMED:
                return failed
            if copied.pytest([failed.partition("::")[0]], [failed], limit_s).failed:
                return failed
            self._tell(f"{scope} {number:2} {failed} failed once, and not again")
            tests = tests[tests.index(failed) + 1 :]
        return None


class Imports:
    """Import graph: which test files load which modules of `hadal`, directly or not."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Path, set[Path]] = {}

    def any(self, path: Path, modules: set[str]) -> bool:
        """Return whether a file, or a conftest.py above it, loads one of the modules."""
        todo = [path, *(above / "conftest.py" for above in path.parents if above != self._folder)]
        seen: set[Path] = set()
        while todo:
            one = todo.pop()
            if one in seen or not one.is_file():
                continue
            seen.add(one)
            if one.is_relative_to(self._folder / "src") and _module(one, self._folder) in modules:
                return True
            todo += self._of(one)
        return False

    def _of(self, path: Path) -> set[Path]:
        if path not in self._known:
            self._known[path] = {
                place
                for name in modules_of(path)
                if name.startswith(("hadal", "tests"))
                for place in self._files(name)
            }
        return self._known[path]

    def _files(self, name: str) -> list[Path]:
        base = self._folder / ("src" if name.startswith("hadal") else "") / name.replace(".", "/")
        return [base.with_suffix(".py"), base / "__init__.py"]


def _module(path: Path, checkout: Path) -> str:
    return ".".join(path.relative_to(checkout / "src").with_suffix("").parts)


def _tests_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("test_*.py"))


def table_of(points: list[Point], name_to_run: dict[str, Any]) -> Table:
    """Return a table of all mutants with their result in each checkout."""
    table = Table("", "place", "function", "change", *name_to_run, title="mutants")
    for number, point in enumerate(points):
        results = [run.get("results", {}).get(str(number), {}) for run in name_to_run.values()]
        table.add_row(
            str(number),
            next((one["place"] for one in reversed(results) if "place" in one), ""),
            point.function,
            escape(f"{point.was}  →  {point.now}"),
            *(_fate(one) for one in results),
        )
    return table


def _fate(result: dict[str, Any]) -> str:
    if not result.get("done"):
        return "not run"
    if "killed_by" not in result:
        return result["place"]
    if killed_by := result["killed_by"]:
        return f"{killed_by.partition('::')[0].removeprefix('tests/')} {result['seconds']:.0f} s"
    num_run = sum(run for run, _ in result["tried"].values())
    num_left = sum(left for _, left in result["tried"].values())
    capped = f", {num_left} left out" if num_left else ""
    return f"SURVIVED {num_run} tests{capped}, {result['seconds']:.0f} s"


def _summary(points: list[Point], name_to_run: dict[str, Any]) -> list[str]:
    lines = []
    killed: dict[str, set[int]] = {}
    for name, run in name_to_run.items():
        done = {int(n): one for n, one in run.get("results", {}).items() if one.get("done")}
        killed[name] = {number for number, one in done.items() if one.get("killed_by")}
        lines.append(f"{name}: {len(killed[name])} of {len(points)} killed, {len(done)} run")
    together: dict[str, set[int]] = defaultdict(set)
    for name in killed:
        together[name.partition(" ")[0]] |= killed[name]
    lines += [
        f"{name}, all levels: {len(numbers)} of {len(points)} killed"
        for name, numbers in together.items()
        if name not in killed
    ]
    killed = together
    for number, point in enumerate(points):
        by = [name for name in killed if number in killed[name]]
        if by and len(by) < len(killed):
            lines.append(f"only in {', '.join(by)}: {number} {point.function}: {point.was}")
    return lines


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tests.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--num", type=int, default=60, help="mutants, as many of each room (60)")
    add("--seed", type=int, default=14, help="of the draw (14)")
    add(
        "--checkout",
        type=Path,
        action="append",
        metavar="FOLDER",
        help="a tree to change and its own tests to run; may be given again: then only what stands "
        "in all of them is drawn (default: this one)",
    )
    add("--out", type=Path, default=ROOT / "build/mutants.json", help="where results are kept")
    add("--resume", action="store_true", help="keep the mutants and the results that --out holds")
    add(
        "--again",
        choices=("survived", "all"),
        help="with --resume: forget these results, and which tests execute what, of each checkout",
    )
    add("--list", action="store_true", help="print what is drawn and end")
    add("--cap-s", type=float, default=120.0, help="seconds of tests for a mutant and scope (120)")
    add("--file-s", type=float, default=60.0, help="seconds of a test file to learn from (60)")
    add("--timeout", type=float, default=120.0, help="seconds until a test hangs (120)")
    return parser.parse_args(arguments)


def _forget(run: dict[str, Any], which: str) -> None:
    run.pop("reach", None)
    results = run.get("results", {})
    for number in list(results):
        if which == "all" or not results[number].get("killed_by"):
            del results[number]


def _killers(name_to_run: dict[str, Any]) -> dict[int, str]:
    """Return mutant -> a test that noticed it in some checkout."""
    return {
        int(number): result["killed_by"]
        for run in name_to_run.values()
        for number, result in run.get("results", {}).items()
        if "::" in (result.get("killed_by") or "")
    }


def main(arguments: list[str]) -> int:
    """Run the command. Returns 0 once all mutants were tried: a survivor is a finding, not an error."""
    asked = _options(arguments)
    # SystemExit passes through the blocks that end child processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    checkouts = [path.resolve() for path in asked.checkout or [ROOT]]
    console = Console(width=None if sys.stdout.isatty() else 200)
    state: dict[str, Any] = {"runs": {}}
    if asked.resume and asked.out.exists():
        state = json.loads(asked.out.read_text())
        points = [Point(**point) for point in state["points"]]
    else:
        candidates = points_of([read_tree(path) for path in checkouts])
        points = draw(candidates, asked.num, asked.seed)
        state["points"] = [asdict(point) for point in points]
        console.print(f"{len(points)} of {len(candidates)} mutants, seed {asked.seed}")

    def save() -> None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(state, indent=1))

    if not asked.list:
        options = Options(asked.cap_s, asked.file_s, asked.timeout)
        for path in checkouts:
            noticed: set[int] = set()
            for run in runs_of(path):
                its_state = state["runs"].setdefault(run.name, {})
                if asked.again:
                    _forget(its_state, asked.again)
                killers = _killers(state["runs"])
                trial = Trial(run, points, its_state, killers, options, console)
                trial.leave_out(noticed)
                trial.run(save)
                noticed |= trial.noticed()
    console.print(table_of(points, state["runs"]))
    for line in _summary(points, state["runs"]):
        console.print(line, markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
