"""Parts of a simulation in processes of their own: their results and errors. No process is left
behind, however the pool ends.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing import active_children

import pytest
from pebble import ProcessExpired

from hadal.core.errors import ConfigError
from hadal.lab.simulate.processes import Processes, processes
from tests.unit.commands.parts import blocked, die_halfway, part, refused
from tests.waiting import wait_until

LONG_S = 600.0


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Set Python's own handler of Ctrl-C before and after each test, which must leave no process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert not active_children()


def press() -> None:
    """Press Ctrl-C, then wait: only an exception ends this function."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(LONG_S)


def end_with(end: Callable[[], None]) -> None:
    """Run two long parts while a third is queued, then call `end`."""
    with processes(2) as pool:
        for _ in range(3):
            pool.submit(time.sleep, LONG_S)
        wait_until(lambda: len(active_children()) == 2, "two are at work")
        end()


def test_each_part_has_a_process_of_its_own() -> None:
    with processes(2) as pool:
        found = [pool.submit(part, size, by=2.0) for size in (1, 10, 100)]
        assert [future.result()[1] for future in found] == [2.0, 20.0, 200.0]
        assert len({os.getpid(), *(future.result()[0] for future in found)}) == 4
        more_than_a_pipe_holds = 1_000_000
        assert len(pool.submit(bytes, more_than_a_pipe_holds).result()) == more_than_a_pipe_holds
        assert pool.submit(len, bytes(more_than_a_pipe_holds)).result() == more_than_a_pipe_holds


def test_an_error_comes_back_with_where_it_was() -> None:
    with processes(1) as pool:
        with pytest.raises(ConfigError) as caught:
            pool.submit(refused).result()
        assert str(caught.value) == "it cannot be.", "a user is told no more"
        assert "in refused" in str(caught.value.__cause__)
        with pytest.raises(AttributeError, match="pickle"):
            pool.submit(lambda: None).result()
        assert pool.submit(abs, -1).result() == 1, "and the next part is done"


def test_a_process_that_dies_takes_its_own_part_with_it() -> None:
    with processes(2) as pool:
        dead, other = pool.submit(os._exit, 9), pool.submit(abs, -1)
        with pytest.raises(ProcessExpired):
            dead.result()
        assert other.result() == 1
        with pytest.raises(ProcessExpired):
            pool.submit(die_halfway).result()


def test_an_error_here_ends_those_that_run() -> None:
    with pytest.raises(ConfigError):
        end_with(refused)
    assert not active_children()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_ends_what_nobody_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C at the end of the block, which waits for running parts."""

    def pressed(pool: Processes) -> None:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)

    def wait_for_it() -> None:
        with processes(1) as pool:
            parts.append(pool.submit(time.sleep, LONG_S))
            monkeypatch.setattr(Processes, "shutdown", pressed)

    parts: list[Future[None]] = []
    with pytest.raises(KeyboardInterrupt):
        wait_for_it()
    assert parts[0].cancelled() or isinstance(parts[0].exception(timeout=0), ProcessExpired)


def test_the_first_ctrl_c_ends_all_and_no_other_is_heard() -> None:
    with pytest.raises(KeyboardInterrupt):
        end_with(press)
    assert not active_children()
    os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "what is left to do is to leave"


def test_processes_are_born_deaf_to_it() -> None:
    with processes(1) as pool:
        assert pool.submit(blocked).result()
    assert not blocked(), "this thread is not"


def test_who_ignores_it_goes_on_ignoring_it() -> None:
    """Ignore Ctrl-C, as a shell makes a background command do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with processes(1) as pool:
        os.kill(os.getpid(), signal.SIGINT)
        assert pool.submit(abs, -1).result() == 1
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
