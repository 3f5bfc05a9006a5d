"""Silence that counts, and silence that has another reason."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from hadal.runtime.process.child import Sight, Watch, look_at

TIMEOUT_S, PERIOD_S = 2.0, 0.5
PIDS = {"gateway": 7, "gateway-1": 8}


def frozen_at(
    watch: Watch, start_s: float, limit_s: float, *, speaks: tuple[str, ...] = ()
) -> dict[str, float]:
    """When each was first found frozen, by a judge who looks every PERIOD_S."""
    found: dict[str, float] = {}
    now_s = start_s
    while now_s <= start_s + limit_s:
        for name in speaks:
            watch.heard(now_s, name)
        for name in watch.frozen(now_s, PIDS):
            found.setdefault(name, now_s - start_s)
        now_s += PERIOD_S
    return found


def watching(look: Sight | None = None) -> Watch:
    watch = Watch(TIMEOUT_S, PERIOD_S, lambda name: look or Sight(3.0, is_stopped=False))
    for name in PIDS:
        watch.heard(0.0, name)
    return watch


def test_one_that_says_nothing_though_it_could_is_frozen() -> None:
    assert frozen_at(watching(), 0.0, 10.0, speaks=("gateway",)) == {
        "gateway-1": TIMEOUT_S + PERIOD_S
    }


def test_a_stopped_one_is_frozen() -> None:
    stopped = Sight(0.0, is_stopped=True)
    assert frozen_at(watching(stopped), 0.0, 10.0, speaks=("gateway",)) == {
        "gateway-1": TIMEOUT_S + PERIOD_S
    }


def test_one_that_gets_no_processor_is_waited_for() -> None:
    watch = Watch(TIMEOUT_S, PERIOD_S, lambda name: Sight(time.monotonic() * 1e6, is_stopped=False))
    for name in PIDS:
        watch.heard(0.0, name)
    assert frozen_at(watch, 0.0, 10.0, speaks=("gateway",)) == {}


def test_a_judge_who_stood_still_begins_to_count_where_it_left() -> None:
    """It was stopped for an hour, or got no processor: what was said meanwhile may still be on its
    way.
    """
    watch = watching()
    assert frozen_at(watch, 0.0, 1.0) == {}
    assert frozen_at(watch, 3600.0, TIMEOUT_S - 1.0) == {}
    watch.heard(3602.0, "gateway")
    watch.heard(3602.0, "gateway-1")
    assert frozen_at(watch, 3602.0, TIMEOUT_S) == {}


def test_a_stopped_process_is_found_out_and_a_crowded_one_waited_for() -> None:
    cores = len(os.sched_getaffinity(0))
    spinning = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4 * cores)
    ]
    try:
        time.sleep(0.5)
        pids = {"crowded": spinning[1].pid, "stopped": spinning[0].pid}
        watch = Watch(0.4, 0.1, lambda name: look_at(pids[name]))
        for name in pids:
            watch.heard(time.monotonic(), name)
        spinning[0].send_signal(signal.SIGSTOP)
        found: list[str] = []
        until_s = time.monotonic() + 10.0
        while not found and time.monotonic() < until_s:
            time.sleep(0.05)
            found = watch.frozen(time.monotonic(), pids)
        assert found == ["stopped"]
        assert watch.why("stopped") == ", stopped"
    finally:
        for process in spinning:
            process.kill()
            process.wait(10)
