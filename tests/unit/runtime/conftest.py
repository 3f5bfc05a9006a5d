"""Reset the process-wide refusal counters before each test of this folder, as in a new process."""

import pytest

from hadal.comm.mesh import refusals as link


@pytest.fixture(autouse=True)
def _as_in_a_new_process() -> None:
    link._of_process.clear()
