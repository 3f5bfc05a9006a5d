"""What runs the suite, on a part of one file: nothing that went wrong may count as passed."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests import suite

AGAIN = [suite.LAST_FAILED, f"{suite.LAST_FAILED}-no-failures=none"]


def test_a_part_that_a_signal_ended_has_failed_and_is_run_whole_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ended = tmp_path / "test_one.py", tmp_path / "ended"
    path.write_text(
        "import os\nfrom pathlib import Path\n"
        f"def test_one():\n    ended = Path({str(ended)!r})\n    if not ended.exists():\n"
        "        ended.touch()\n        os.kill(os.getpid(), 11)\n"
    )
    monkeypatch.setattr(suite, "CACHE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["suite", "-p", "no:faulthandler"])
    part = suite.Part("one", (str(path),))
    assert suite.Running(part, "").code() == 128 + signal.SIGSEGV
    assert part.asked([*AGAIN, "-q"]) == ["-q"]
    assert suite.Running(part, "").code() == 0
    assert part.asked([*AGAIN, "-q"]) == [*AGAIN, "-q"]
