"""A pytest plugin for `tests.mutants`. It runs the given tests in the given order and records how
each ended, how long it took and which mutants' statements it executed.

A copy of this file lies beside `hadal` in a copy of a checkout.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mutants_probe as probe  # Beside this file.
import pytest

_ASKED: dict[str, Any] = json.loads(os.environ["MUTANTS_ASKED"])
"""Fields: `tests`: ordered names, or null for all; `report`: output file; `file_s`: largest total
time of one file's tests.
"""
_tests: dict[str, dict[str, Any]] = defaultdict(lambda: {"s": 0.0, "ok": True, "hits": []})
_files: dict[str, set[int]] = defaultdict(set)
"""Test file -> mutants executed by fixtures that several of its tests share."""
_spent_s: Counter[str] = Counter()
_first_failed: list[str] = []


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if (tests := _ASKED["tests"]) is not None:
        place = {name: index for index, name in enumerate(tests)}
        items[:] = sorted(
            (item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid]
        )


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    _files[probe.EVERYWHERE].update(probe.taken())
    if report.failed:
        _first_failed.append(collector.nodeid)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Iterator[None]:
    if fixturedef.scope == "function":
        return (yield)
    before = probe.taken()
    try:
        return (yield)
    finally:
        _files[_file(request._pyfuncitem.nodeid)].update(probe.taken())
        for mutant in before:  # Hits from before the fixture belong to the test.
            probe.hit(mutant)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    probe.taken()
    started_s = time.monotonic()
    done = yield
    _spent_s[_file(item.nodeid)] += time.monotonic() - started_s
    _tests[item.nodeid]["s"] = round(time.monotonic() - started_s, 3)
    _tests[item.nodeid]["hits"] = probe.taken()
    return done


def pytest_runtest_setup(item: pytest.Item) -> None:
    if _spent_s[_file(item.nodeid)] > _ASKED["file_s"]:
        pytest.skip("its file took long enough")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        late = " (timeout)" if "from pytest-timeout" in str(report.longrepr) else ""
        _first_failed.append(report.nodeid + late)
    if not report.passed:
        _tests[report.nodeid]["ok"] = False


def pytest_sessionfinish() -> None:
    files = {name: sorted(hits) for name, hits in _files.items() if hits}
    found = {"tests": _tests, "files": files, "failed": _first_failed[:1]}
    Path(_ASKED["report"]).write_text(json.dumps(found))


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
