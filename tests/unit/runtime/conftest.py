"""For every test of this folder: what earlier ones listened for and refused is not of its process."""

import pytest

from hadal.comm.mesh import refusals as link


@pytest.fixture(autouse=True)
def _as_in_a_new_process() -> None:
    link._of_process.clear()
