"""Set a long silence timeout for peers: on a busy machine a thread may be silent for longer than a
peer may be in production. Tests of silence set their own.
"""

import pytest

from hadal.runtime.transfer import peers
from tests.waiting import DEADLINE_S


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "SILENCE_S", DEADLINE_S)
