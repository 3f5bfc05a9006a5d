"""The suite's runner, on parts of one file: no failure counts as passed, and skipped tests are reported."""

from __future__ import annotations

import os
import signal
import tomllib
from pathlib import Path

import msgspec
import pytest

from tests.needs import HOW
from tests.suite import parts as suite_parts
from tests.suite.__main__ import suite_console
from tests.suite.budget import PATH, Budget
from tests.suite.changed import chosen
from tests.suite.events import Ended, Event, Selected, Used
from tests.suite.folders import folder_of
from tests.suite.parts import ROOT, Part, Running, parts
from tests.suite.summary import Summary, chosen_options

MIXED = f"""
import pytest

def test_good():
    pass

def test_bad():
    assert 1 == 2

@pytest.mark.skip(reason="no promtool{HOW}apt-get install prometheus")
def test_without_its_tool():
    pass

@pytest.mark.more("for later")
def test_later():
    pass

@pytest.fixture
def broken():
    yield
    raise RuntimeError("not clean")

def test_left_dirty(broken):
    pass
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite_parts, "CACHE", tmp_path)


def run(path: Path, *options: str, level: str = "test") -> tuple[int, list[Event], str]:
    """Run a file as a part; return the exit code, its events and its output."""
    # Outside the tests' folder their conftest.py must be loaded as a plugin.
    command = ("-p", "tests.conftest", "-c", str(suite_parts.ROOT / "pyproject.toml"), *options)
    running = Running(Part("one", (str(path),)), command, {"HADAL_LEVEL": level})
    running._process.wait(120)
    events = [msgspec.json.decode(line, type=Event) for line in running.read()]
    return running.poll() or 0, events, running.output.read_text()


def test_events_tell_what_every_test_came_to(tmp_path: Path) -> None:
    path = tmp_path / "test_mixed.py"
    path.write_text(MIXED)
    code, events, _ = run(path)
    assert code == suite_parts.SOME_FAILED
    assert isinstance(events[0], Selected)
    assert sum(events[0].folder_to_num.values()) == 4
    assert isinstance(events[-1], Used)
    name_to_outcomes: dict[str, list[str]] = {}
    for event in events:
        if isinstance(event, Ended):
            name_to_outcomes.setdefault(event.test.partition("::")[2], []).append(event.outcome)
    assert name_to_outcomes == {
        "test_good": ["passed"],
        "test_bad": ["failed"],
        "test_without_its_tool": ["skipped"],
        "test_left_dirty": ["passed", "error"],
    }
    summary = Summary()
    failed = [name for event in events if (name := summary.note("one", event))]
    assert [name.partition("::")[2] for name in failed] == ["test_bad", "test_left_dirty"]
    assert summary.closing_line() == "2 passed, 2 failed, 1 skipped"
    console = suite_console()
    console.width = 120
    summary.slow.append(Ended("test_mixed.py::test_good[/v1/models]", "passed", 9.0))
    with console.capture() as captured:
        console.print(summary.table_slow())
        console.print(summary.table_left_out())
    assert "test_good[/v1/models]" in captured.get()
    assert "no promtool" in captured.get()
    assert "apt-get install prometheus" in captured.get()


@pytest.mark.parametrize(
    ("level", "num"),
    [("test", 4), ("more", 1), ("all", 5), ("", 5)],
    ids=["test", "more", "all", "none"],
)
def test_a_level_takes_its_tests(tmp_path: Path, level: str, num: int) -> None:
    path = tmp_path / "test_mixed.py"
    path.write_text(MIXED)
    _, events, _ = run(path, level=level)
    assert isinstance(events[0], Selected)
    assert sum(events[0].folder_to_num.values()) == num


def test_a_part_that_a_signal_ended_has_failed(tmp_path: Path) -> None:
    path = tmp_path / "test_one.py"
    path.write_text("import os\ndef test_one():\n    os.kill(os.getpid(), 11)\n")
    code, _, _ = run(path, "-p", "no:faulthandler")
    assert code == 128 + signal.SIGSEGV


def test_a_hang_shows_the_stacks_of_all_processes(tmp_path: Path) -> None:
    path = tmp_path / "test_one.py"
    path.write_text(
        "import subprocess, sys\nfrom tests.waiting import wait_until\n"
        "def test_one():\n"
        "    name = 'waits_' + 'in_vain'\n"
        "    code = f'import time\\ndef {name}():\\n print(flush=True)\\n time.sleep(60)\\n{name}()'\n"
        "    child = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE)\n"
        "    child.stdout.readline()\n"
        "    try:\n        wait_until(lambda: False, 'the moon is blue', 2.0)\n"
        "    finally:\n        child.kill()\n        child.communicate()\n"
    )
    code, _, output = run(path)
    assert code == suite_parts.SOME_FAILED
    assert "still not: the moon is blue" in output
    assert "Stacks of all processes" in output
    # An ordinary user may lack the right to inspect other processes; then the report contains that
    # fact.
    assert "waits_in_vain (" in output or os.geteuid()


def test_parts_take_each_file_once() -> None:
    found = [
        argument for part in parts(()) for argument in part.arguments if argument.endswith(".py")
    ]
    files = sorted(path.relative_to(suite_parts.ROOT).as_posix() for path in files_of_tests())
    assert sorted(found) == files


def files_of_tests() -> list[Path]:
    return list((suite_parts.ROOT / "tests").rglob("test_*.py"))


def test_paths_and_options_are_told_apart() -> None:
    asked = ["-k", "drafts", "tests/dist", "--durations=5", "./tests/sim/test_swarm.py::test_one"]
    options, paths = chosen_options(asked)
    assert options == ["-k", "drafts", "--durations=5"]
    assert paths == ["tests/dist", "./tests/sim/test_swarm.py::test_one"]


@pytest.mark.parametrize(
    ("changed", "included", "left_out"),
    [
        (
            "src/hadal/gateway/api/openai/request.py",
            "tests/unit/gateway/test_openai.py",
            "tests/unit/kv/test_blocks.py",
        ),
        (
            "src/hadal/kv/blocks.py",
            "tests/unit/kv/test_blocks.py",
            "tests/unit/overlap/test_plan.py",
        ),
        (
            "src/hadal/kv/blocks.py",
            "tests/dist/test_exactness.py",
            "tests/unit/kernels/test_sampling.py",
        ),
        ("tests/dist/hosts.py", "tests/dist/test_hosts.py", "tests/dist/test_exactness.py"),
        ("bench/fleet_day.py", "tests/unit/test_fleet_bench.py", "tests/dist/test_exactness.py"),
        (
            "tests/unit/kv/test_blocks.py",
            "tests/unit/kv/test_blocks.py",
            "tests/unit/kv/test_runs.py",
        ),
        ("evals/lists.yaml", "tests/unit/test_tasks.py", "tests/unit/kv/test_blocks.py"),
    ],
)
def test_a_change_chooses_what_may_import_it(changed: str, included: str, left_out: str) -> None:
    found = chosen([changed])
    assert included in found
    assert left_out not in found
    assert "tests/test_tidy.py" in found


def test_a_folder_far_above_its_budget_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    summary, budget = Summary(), Budget("test")
    monkeypatch.setattr(budget, "_units", {"tests/sim": 10.0, "tests/dist": 10.0})
    summary.folder_to_s.update({"tests/sim": 2.9, "tests/dist": 3.1, "tests/new": 9.0})
    _, over = summary.table_processor(budget, 0.1)
    assert over == ["tests/dist"]


def test_every_folder_of_tests_has_a_budget() -> None:
    """A renamed folder needs its budget under the new name: without a budget, it could never exceed it."""
    tests = (path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py"))
    folders = {folder_of(str(path)) for path in tests} | {"collection"}
    units = tomllib.loads(PATH.read_text())["units"]
    assert set(units["test"]) == folders
    assert set(units["more"]) <= folders
