"""The bench of what secrets cost runs, and measures all that it names."""

from __future__ import annotations

import pytest

from bench import secret_cost


@pytest.mark.slow("two processes, started three times")
@pytest.mark.more("a bench that runs; what secrets do is tested in tests/unit/runtime/transfer")
def test_a_quick_run_measures_pulls_and_exchanges(capsys: pytest.CaptureFixture[str]) -> None:
    secret_cost.main(["--quick"])
    shown = capsys.readouterr().out
    for what in (
        "pull of 1 x 400",
        "pull of 64 x 400",
        "exchange of 1,000",
        "exchange of 100,000",
        "tagged",
    ):
        assert what in shown
