"""Test lines of the log in both forms: their process, subject and time."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hadal.runtime.process import logs
from hadal.runtime.process.logs import (
    JSON,
    REQUEST_ID,
    TEXT,
    KeptHandler,
    KeptLines,
    KeptReader,
    LineFormatter,
    about,
    as_line,
    fields,
)
from tests.waiting import DEADLINE_S

AT_S = 1_790_000_000.5
TIME = "2026-09-21T14:13:20.500Z"


def record(
    message: str, *values: object, extra: dict[str, Any] | None = None, exc_info: Any = None
) -> Any:
    made = logging.getLogger("hadal.test").makeRecord(
        "hadal.test", logging.WARNING, "file", 1, message, values, exc_info, extra=extra
    )
    made.created = AT_S
    return made


def test_text_has_the_time_once_and_at_the_start() -> None:
    line = LineFormatter("decode-0.2", TEXT).format(
        record("rank %d is gone", 1, extra=fields(much="more"))
    )
    assert line == f"{TIME} decode-0.2   WARNING rank 1 is gone"


def test_json_has_what_is_known() -> None:
    line = json.loads(
        LineFormatter("decode-0.2", JSON).format(record('a "b"\nc', extra=fields(ms=1.5)))
    )
    assert line == {
        "time": TIME,
        "level": "warning",
        "process": "decode-0.2",
        "message": 'a "b"\nc',
        "unit": "decode-0",
        "rank": 2,
        "ms": 1.5,
        "logger": "hadal.test",
    }
    about_other = json.loads(
        LineFormatter("supervisor", JSON).format(record("x", extra=about("prefill-1")))
    )
    assert (about_other["process"], about_other["unit"], "rank" in about_other) == (
        "supervisor",
        "prefill-1",
        False,
    )


@pytest.mark.parametrize("form", [TEXT, JSON])
def test_the_request_that_is_worked_on_is_named(form: str) -> None:
    told = REQUEST_ID.set("mine-1")
    try:
        line = LineFormatter("gateway", form).format(record("slow"))
    finally:
        REQUEST_ID.reset(told)
    assert (
        line.endswith("slow [request mine-1]")
        if form == TEXT
        else json.loads(line)["request_id"] == "mine-1"
    )
    assert "mine-1" not in LineFormatter("gateway", form).format(record("slow"))


def test_an_error_is_one_line_of_json_and_indented_text() -> None:
    try:
        raise ValueError("no luck")
    except ValueError as error:
        failed = record("it failed", exc_info=(type(error), error, error.__traceback__))
    line = LineFormatter("gateway", JSON).format(failed)
    assert "\n" not in line
    assert json.loads(line)["traceback"].endswith("ValueError: no luck")
    first, *rest = LineFormatter("gateway", TEXT).format(failed).splitlines()
    assert first.endswith("it failed")
    assert rest[-1] == "    ValueError: no luck"
    assert all(as_line("gateway", TEXT, one.encode(), 0.0) == one.encode() for one in rest)


@pytest.mark.parametrize("form", [TEXT, JSON])
def test_a_line_that_cannot_be_made_stops_nobody(
    form: str, capfd: pytest.CaptureFixture[str]
) -> None:
    formatter = LineFormatter("gateway", form)
    assert "\\udcff is no text" in formatter.format(record("\udcff is no text")).replace(
        "\\\\", "\\"
    )
    code = (
        "import logging\nfrom hadal.runtime.process.logs import fields, start_log\n"
        f"start_log('gateway', 'info', {form!r})\n"
        "logging.info('%d', 'x', extra=fields(odd=object()))\nlogging.info('it goes on')\n"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        timeout=DEADLINE_S,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    told = capfd.readouterr().err
    assert "Logging error" in told
    assert "it goes on" in told


@pytest.mark.parametrize("form", [TEXT, JSON])
def test_what_else_is_printed_becomes_a_line(form: str) -> None:
    logged = LineFormatter("decode-0", form).format(record("x")).encode()
    assert as_line("decode-0", form, logged, AT_S) == logged
    printed = as_line("decode-0", form, b"[W] \xff gloo says\n", AT_S).decode()
    if form == TEXT:
        assert re.fullmatch(TIME + r" decode-0 +WARNING \[W\] \ufffd gloo says\n", printed)
    else:
        assert json.loads(printed)["message"] == "[W] \ufffd gloo says"
        assert printed.endswith("}\n")


@pytest.mark.promise(
    "prints the last lines of a unit's processes in order, whether or not the server answers"
)
@pytest.mark.promise(
    "show this host's units and processes, restarts with their causes, and current "
    "problems; print the processes' last log lines"
)
def test_the_last_lines_are_kept_and_the_oldest_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes kept: at least as many as promised, at most twice as many plus two lines."""
    monkeypatch.setattr(logs, "KEPT_BYTES", 1000)
    kept = KeptLines(tmp_path, "decode-0.1")
    assert KeptReader(tmp_path, "decode-0.1").read() == []
    written = [f"line {number}\n".encode() for number in range(1000)]
    for number, line in enumerate(written):
        kept.write(line)
        found = KeptReader(tmp_path, "decode-0.1").read()
        assert found == written[number + 1 - len(found) : number + 1]
        assert sum(map(len, found)) >= min(1000, sum(map(len, written[: number + 1])))
        assert sum(map(len, found)) <= 2 * 1000 + 2 * len(line)
    kept.close()
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


@pytest.mark.parametrize("every", [1, 7, 33])
def test_a_reader_misses_no_line_that_is_kept_and_repeats_none(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line has about 9 bytes, a file 300: it rotates between some reads of 7 lines, between all of 33."""
    monkeypatch.setattr(logs, "KEPT_BYTES", 300)
    kept, reader = KeptLines(tmp_path, "gateway"), KeptReader(tmp_path, "gateway")
    written, found = [], []
    for number in range(200):
        written.append(f"line {number}\n".encode())
        kept.write(written[-1])
        if number % every == 0:
            found += reader.read()
    kept.close()
    assert found + reader.read() == written
    assert reader.read() == []
    with (tmp_path / "gateway").open("ab") as file:
        file.write(b"half of ")
        file.flush()
        assert reader.read() == []
        file.write(b"a line\n")
        file.flush()
        assert reader.read() == [b"half of a line\n"]


def test_two_threads_may_keep_lines_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two relays may run: a dead process's pipe is drained while its successor writes."""
    monkeypatch.setattr(logs, "KEPT_BYTES", 1 << 20)
    kept = KeptLines(tmp_path, "decode-0")

    def relay(name: str) -> None:
        for number in range(500):
            kept.write(f"{name} {number}\n".encode())
            if number % 10 == 0:
                kept.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(relay, "abcd"))
    kept.close()
    found = KeptReader(tmp_path, "decode-0").read()
    for name in "abcd":
        mine = [line for line in found if line.startswith(name.encode())]
        assert mine == [f"{name} {number}\n".encode() for number in range(500)]


def test_a_log_that_cannot_be_kept_stops_nothing(tmp_path: Path) -> None:
    kept = KeptLines(tmp_path / "absent", "supervisor")
    KeptHandler(kept, "supervisor", TEXT).emit(record("lost"))
    assert KeptReader(tmp_path / "absent", "supervisor").read() == []
