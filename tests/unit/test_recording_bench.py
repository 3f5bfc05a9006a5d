"""The bench of recording: it records the calls of a recording again, and its figures follow from
given times.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from bench.recording import Cost, again, cost_of, recording_into, shown, table
from hadal.runtime.recorder import RECORD, Recorded, read_recordings
from tests.unit.lab.sim.recorded import record


def test_what_is_timed_is_the_recorders_own_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RECORD, raising=False)
    recordings = record(1, 5)
    assert {recording.process for recording in recordings} >= {"front", "decode-0"}
    for recording in recordings:
        calls_us = again(recording, tmp_path, len(recording.calls), 0.0)
        assert len(calls_us) == len(recording.calls)
    written = read_recordings(tmp_path)
    assert sorted(one.process for one in written) == sorted(one.process for one in recordings)
    by_process = {one.process: one for one in recordings}
    assert all(one.calls == by_process[one.process].calls for one in written)
    assert RECORD not in os.environ


def test_a_process_is_measured(tmp_path: Path) -> None:
    (front,) = (recording for recording in record(1, 5) if recording.process == "front")
    front = dataclasses.replace(front, calls=front.calls[:12])
    cost = cost_of(front, tmp_path, rounds=1)
    (path,) = (tmp_path / "front-row-0").iterdir()
    assert cost.num_bytes == path.stat().st_size
    assert len(cost.calls_us) == len(cost.apart_us) == 12
    assert cost.span_s == front.calls[-1].now_s - front.calls[0].now_s
    with pytest.raises(ValueError, match="front has no calls"):
        cost_of(dataclasses.replace(front, calls=()), tmp_path)


def test_what_a_call_takes_anyway_is_not_the_recorders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (front,) = (recording for recording in record(1, 5) if recording.process == "front")
    monkeypatch.setattr(
        "bench.recording.times_us",
        lambda role, calls, apart_s: [5.0 if isinstance(role, Recorded) else 2.0 for _ in calls],
    )
    assert again(front, tmp_path, 4, 0.0) == [3.0] * 4


def test_the_figures_of_a_process() -> None:
    cost = Cost("front", 2.0, (1.0, 2.0, 3.0, 6.0), (10.0, 20.0), 2_000)
    assert cost.call_bytes == 500
    assert cost.core_share == pytest.approx(4 * 15e-6 / 2.0)
    assert shown(cost.calls_us) == "3.0 (2.5, 6.0)"
    assert table([cost]).row_count == 1


def test_the_environment_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RECORD, "elsewhere")
    with recording_into(tmp_path):
        assert os.environ[RECORD] == str(tmp_path)
    assert os.environ[RECORD] == "elsewhere"
