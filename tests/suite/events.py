"""A pytest plugin for `tests.suite`. It writes each test's result as a line when the test ends, and
the processor time of each folder of tests.

    python -m tests.suite              pytest of a part              its workers (pytest-xdist)
        reads PART.events <------------- writes a line per test <----- reports
                                         and one at the end     <----- seconds by folder
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest

from tests import stacks
from tests.levels import SLOW_S
from tests.suite.folders import folder_of

VARIABLE = "HADAL_SUITE_EVENTS"
"""Environment variable: path of the output file."""
USED = "hadal_used"
"""Key under which a worker sends its `Used` to the process that receives all reports."""
num_servers = 0
"""Servers that this process has started for tests."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Selected(msgspec.Struct, tag=True):
    """Event after collection: number of tests of a part, by folder."""

    folder_to_num: dict[str, int]


class Ended(msgspec.Struct, tag=True):
    """Event after a test: its result."""

    test: str
    outcome: str
    """One of: passed, failed, error, skipped."""
    seconds: float
    why: str = ""
    """Reason of a skipped test."""
    is_slow_without_reason: bool = False


class Used(msgspec.Struct, tag=True):
    """Event at the end of a process that runs tests: resources that it used."""

    folder_to_s: dict[str, float]
    """Folder of tests -> processor seconds."""
    num_servers: int = 0


Event = Selected | Ended | Used


def processor_s() -> float:
    """Return the processor seconds of this process and of all processes it started, since their starts."""
    return sum(_seconds(pid) for pid in {os.getpid(), *stacks.processes()})


def _seconds(pid: int) -> float:
    """Return the processor seconds of one process and of its ended children."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS_PER_S


class Measuring:
    """Processor seconds by folder, measured in the process that runs tests whenever the folder changes."""

    def __init__(self) -> None:
        self.folder_to_s: Counter[str] = Counter()
        self._before_s = processor_s()

    def note(self, folder: str) -> None:
        """Add the processor time since the last call to this folder."""
        now_s = processor_s()
        self.folder_to_s[folder] += now_s - self._before_s
        self._before_s = now_s

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        result = yield
        self.note("collection")
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Iterator[bool]:
        result = yield
        folder = folder_of(item.nodeid)
        if nextitem is None or folder_of(nextitem.nodeid) != folder:
            self.note(folder)
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[USED] = msgspec.to_builtins(self.used())

    def used(self) -> Used:
        return Used(dict(self.folder_to_s), num_servers)


class Telling:
    """Writer of the events, in the process that receives all reports."""

    def __init__(self, file: IO[bytes], measuring: Measuring | None) -> None:
        self._file = file
        self._measuring = measuring
        self._collected = False

    def tell(self, event: Event) -> None:
        self._file.write(msgspec.json.encode(event) + b"\n")
        self._file.flush()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._selected([item.nodeid for item in session.items])

    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._selected(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = report.duration
        if report.when == "call" and report.outcome != "skipped":
            is_unexplained = seconds > SLOW_S and "slow" not in report.keywords
            self.tell(Ended(report.nodeid, report.outcome, seconds, "", is_unexplained))
        elif report.outcome == "skipped":
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            self.tell(Ended(report.nodeid, "skipped", seconds, why.removeprefix("Skipped: ")))
        elif report.outcome == "failed":
            self.tell(Ended(report.nodeid, "error", seconds))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        if used := getattr(node, "workeroutput", {}).get(USED):
            self.tell(msgspec.convert(used, Used))

    def pytest_unconfigure(self) -> None:
        if self._measuring is not None:
            self.tell(self._measuring.used())
        self._file.close()

    def _selected(self, tests: list[str]) -> None:
        if tests and not self._collected:
            self._collected = True
            self.tell(Selected(Counter(map(folder_of, tests))))


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")
    does_distribute = bool(getattr(config.option, "numprocesses", None))
    measuring = None if does_distribute and not is_worker else Measuring()
    if measuring is not None:
        config.pluginmanager.register(measuring, "hadal-measuring")
    if not is_worker:
        file = open(os.environ[VARIABLE], "wb")  # noqa: SIM115  Closed at the end of the session.
        config.pluginmanager.register(Telling(file, measuring), "hadal-telling")
