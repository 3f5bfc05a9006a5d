"""The bench of many hosts: the parts that can run on one host."""

from __future__ import annotations

import pytest

from bench import hosts


def test_the_plan_of_the_published_peak_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    hosts.main(["--quick", "plan"])
    assert "launch plan of 278 nodes, 2,265 processes: " in capsys.readouterr().out


def test_a_part_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        hosts.main(["steps"])
    assert "unknown: steps. Known: plan, start, step." in capsys.readouterr().err
