"""The bench of messages runs, and measures both ways."""

from __future__ import annotations

import pytest

from bench import wire


def test_a_quick_run_measures_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    wire.main(["--quick"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "there and back"
    assert [line.partition(" bytes")[0] for line in lines[1:]] == [
        "1 x 300",
        "144 x 300",
        "1 x 4,000",
        "144 x 4,000",
        "1 x 442,000",
    ]
    assert all(float(line.split()[8]) > 0.0 for line in lines[1:]), lines
