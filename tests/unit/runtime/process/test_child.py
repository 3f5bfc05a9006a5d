"""Test a child process of a supervisor: start, output, reaping, backoff, and giving up in the end."""

import os
import signal
from pathlib import Path

import pytest

import hadal
from hadal.runtime.process.backoff import EXITS_MAX, FAILED_STARTS_MAX, PUT_OFF_MAX_S, PUT_OFF_S
from hadal.runtime.process.child import RESTART_TIMEOUT_S, START_TIMEOUT_S, Child, ProcessPhase
from hadal.runtime.process.forks import Started, start_here
from hadal.runtime.process.relay import OutputRelay
from tests.waiting import DEADLINE_S, wait_until


def make(tmp_path: Path, code: str) -> Child:
    (tmp_path / "childcode.py").write_text(code)
    return Child("decode-0", "decode", ["childcode"], OutputRelay("decode-0", tmp_path / "log"))


def start(child: Child, path: Path | str, now_s: float = 0.0) -> None:
    """Start the child on this host, with `path` as its PYTHONPATH."""
    environment = {**os.environ, "PYTHONPATH": str(path), "PYTHONUNBUFFERED": "1"}
    child.start(
        now_s, lambda arguments, epoch_number: start_here(child.name, arguments, environment)
    )


def test_one_that_another_supervisor_started_works_and_its_next_life_is_of_this_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "childcode.py").write_text("import time; time.sleep(600)")
    other = start_here("decode-0", ["childcode"], {**os.environ, "PYTHONPATH": str(tmp_path)})
    relay = OutputRelay("decode-0", tmp_path / "log")
    child = Child("decode-0", "decode", ["childcode"], relay, first_epoch_number=1001)
    child.adopt(5.0, other)
    assert (child.phase, child.pid, child.is_adopted) == (ProcessPhase.STARTING, other.pid, True)
    child.is_ready(5.5)
    assert (child.phase, child.progress.ready_s) == (ProcessPhase.READY, 5.5)
    child.signal(signal.SIGKILL)
    assert reap(child) == -signal.SIGKILL
    assert (child.phase, child.backoff.num_failed_starts) == (ProcessPhase.WAITING, 0), "a crash"
    lives: list[int] = []

    def start_next(arguments: tuple[str, ...], epoch_number: int) -> Started:
        lives.append(epoch_number)
        return start_here("decode-0", arguments, {**os.environ, "PYTHONPATH": str(tmp_path)})

    child.start(6.0, start_next)
    assert lives == [1001]
    assert not child.is_adopted
    child.signal(signal.SIGKILL)
    reap(child)


def reap(child: Child, now_s: float = 0.0) -> int:
    def ended() -> list[int]:
        code = child.poll(now_s)
        return [] if code is None else [code]

    return wait_until(ended, f"{child.name} has ended")[0]


def test_its_output_is_kept_and_logged(tmp_path: Path) -> None:
    child = make(tmp_path, "import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)")
    start(child, tmp_path)
    assert child.phase is ProcessPhase.STARTING
    assert child.status().pid == child.pid > 0
    assert reap(child) == 3
    log = tmp_path / "log"  # The pipe's reader makes the file, maybe after the child has ended.
    wait_until(lambda: log.exists() and log.read_text().count("\n") == 2, "both are logged")
    lines = log.read_text().splitlines()
    # Output that is no log line becomes one, under the child's name.
    assert [line.split()[1:] for line in lines] == [
        ["decode-0", "WARNING", "one"],
        ["decode-0", "WARNING", "two"],
    ]
    assert child.phase is ProcessPhase.WAITING
    assert child.pid == 0


def test_one_whose_log_cannot_be_opened_does_not_stand_still(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The output exceeds a pipe's buffer, so the pipe must be read."""
    child = make(tmp_path, "print('x' * 99 * 2**10); raise SystemExit(3)")
    (tmp_path / "log").mkdir()
    start(child, tmp_path)
    assert reap(child) == 3
    assert "cannot be written there" in caplog.text


def test_what_cannot_be_started_is_tried_less_and_less_often(tmp_path: Path) -> None:
    child = make(tmp_path, "")
    waits_s = [child.backoff.delay(10.0) for _ in range(7)]
    assert waits_s == sorted(waits_s)
    assert 0.0 < waits_s[0] < waits_s[-1] == waits_s[-2]
    assert child.backoff.start_at_s == 10.0 + waits_s[-1]
    assert child.phase is ProcessPhase.WAITING


def test_what_a_start_does_is_heard_and_not_logged(tmp_path: Path) -> None:
    child = make(
        tmp_path,
        "from hadal.runtime.process.logs import tell_doing; tell_doing('reads', 1, 4); print('one')",
    )
    source = str(Path(hadal.__file__).parents[1])
    start(child, f"{tmp_path}:{source}")
    assert child.progress.doing is None
    reap(child)
    log = tmp_path / "log"
    wait_until(lambda: log.exists() and log.read_text().endswith("\n"), "a line is logged")
    assert str(child.progress.doing) == "reads (25%)"
    assert child.progress.moved_s > 0.0
    assert (tmp_path / "log").read_text().endswith("one\n")
    assert (tmp_path / "log").read_text().count("\n") == 1


def test_it_is_told_which_start_it_is(tmp_path: Path) -> None:
    child = make(tmp_path, "")
    told: list[tuple[tuple[str, ...], int]] = []

    def start_so(arguments: tuple[str, ...], epoch_number: int) -> Started:
        told.append((arguments, epoch_number))
        return start_here(child.name, arguments, {**os.environ, "PYTHONPATH": str(tmp_path)})

    for number in (1, 2, 3):
        child.start(0.0, start_so)
        reap(child)
        assert child.num_starts == number
    assert told == [(("childcode",), number) for number in (1, 2, 3)]


def test_a_signal_is_told_from_an_exit(tmp_path: Path) -> None:
    child = make(tmp_path, "import time; time.sleep(600)")
    start(child, tmp_path)
    assert child.poll(0.0) is None
    child.signal(signal.SIGKILL)
    assert reap(child) == -signal.SIGKILL
    child.signal(signal.SIGKILL)  # The process is gone.


def test_the_first_crash_is_started_again_at_once_and_later_ones_are_put_off(
    tmp_path: Path,
) -> None:
    child = make(tmp_path, "")
    delays = []
    for now_s in range(100, 140, 5):
        start(child, tmp_path, float(now_s))
        child.is_ready(float(now_s))
        reap(child, float(now_s))
        delays.append(round(child.backoff.start_at_s - now_s, 3))
    assert delays == [0.0, 0.2, 0.5, 1.0, 2.0, 5.0, 5.0, 5.0]
    # After a long stable life the delays start anew.
    start(child, tmp_path, 1000.0)
    child.is_ready(1000.0)
    reap(child, 1020.0)
    assert child.backoff.start_at_s == 1020.0


def test_a_child_that_never_gets_ready_is_given_up(tmp_path: Path) -> None:
    child = make(tmp_path, "")
    for index in range(FAILED_STARTS_MAX):
        assert child.backoff.why_give_up(0.0) is None
        start(child, tmp_path, float(index))
        reap(child, float(index))
    assert "before it was ready" in (child.backoff.why_give_up(10.0) or "")


def test_a_child_that_was_ready_once_has_not_failed_to_start(tmp_path: Path) -> None:
    child = make(tmp_path, "")
    for index in range(FAILED_STARTS_MAX + 1):
        start(child, tmp_path, float(index))
        if index == 1:
            child.is_ready(1.0)
        reap(child, float(index))
    assert child.backoff.why_give_up(10.0) is None


def test_a_child_that_crashes_all_the_time_is_given_up(tmp_path: Path) -> None:
    child = make(tmp_path, "")
    for index in range(EXITS_MAX + 1):
        assert child.backoff.why_give_up(float(index)) is None
        start(child, tmp_path, float(index))
        child.is_ready(float(index))
        reap(child, float(index))
    assert f"{EXITS_MAX + 1} times in" in (child.backoff.why_give_up(float(EXITS_MAX)) or "")
    assert child.backoff.why_give_up(1000.0) is None, "long ago"


@pytest.mark.promise(
    "A rank that dies at every start is tried again later, as long as its unit works without it."
)
def test_one_that_is_put_off_rests_and_is_judged_anew(tmp_path: Path) -> None:
    child = make(tmp_path, "")
    for index in range(FAILED_STARTS_MAX):
        start(child, tmp_path, float(index))
        reap(child, float(index))
    assert child.backoff.why_give_up(10.0) is not None
    assert child.backoff.put_off(10.0) == PUT_OFF_S
    assert child.backoff.start_at_s == 10.0 + PUT_OFF_S
    assert child.backoff.why_give_up(10.0) is None
    start(child, tmp_path, 50.0)
    reap(child, 50.0)
    assert child.backoff.why_give_up(50.0) is None


def test_one_that_cannot_start_is_tried_less_and_less_often_until_it_does(tmp_path: Path) -> None:
    child = make(tmp_path, "")
    assert [child.backoff.put_off(0.0) for _ in range(6)] == [
        15.0,
        30.0,
        60.0,
        120.0,
        PUT_OFF_MAX_S,
        PUT_OFF_MAX_S,
    ]
    start(child, tmp_path, 1.0)
    child.is_ready(2.0)
    reap(child, 3.0)
    assert child.backoff.put_off(4.0) == PUT_OFF_S


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_waiting_for_its_end(tmp_path: Path, number: signal.Signals) -> None:
    child = make(tmp_path, "import time; time.sleep(600)")
    assert child.wait(0.0), "it was never started"
    start(child, tmp_path)
    assert not child.wait(0.05)
    child.signal(number)
    assert child.wait(DEADLINE_S)
    assert child.phase is ProcessPhase.ENDED


def test_one_that_is_replaced_has_not_crashed(tmp_path: Path) -> None:
    child = make(tmp_path, "import time; time.sleep(600)")
    child.replace()  # There is no process to replace.
    for now_s in range(EXITS_MAX + 5):
        start(child, tmp_path, float(now_s))
        child.replace()
        assert reap(child, float(now_s)) == -signal.SIGKILL
        assert child.backoff.start_at_s == now_s
    assert child.backoff.why_give_up(float(now_s)) is None


def test_a_restart_is_not_waited_for_as_long_as_a_first_start(tmp_path: Path) -> None:
    child = make(tmp_path, "")
    limits = []
    for took_s in (1.0, 40.0, 1000.0):
        start(child, tmp_path, 100.0)
        limits.append(child.progress.timeout_s)
        child.is_ready(100.0 + took_s)
        reap(child, 2000.0)
    assert [*limits, child.progress.timeout_s] == [
        START_TIMEOUT_S,
        RESTART_TIMEOUT_S,
        160.0,
        START_TIMEOUT_S,
    ]


def test_one_that_is_not_wanted_rests_when_it_ends_and_counts_no_failure(tmp_path: Path) -> None:
    child = make(tmp_path, "import sys; sys.exit(1)")
    for _ in range(FAILED_STARTS_MAX + 1):
        child.want(0.0)
        start(child, tmp_path)
        child.dismiss()
        assert reap(child) == 1
        assert child.phase is ProcessPhase.RESTING
    assert child.backoff.why_give_up(0.0) is None
    assert child.pid == 0
