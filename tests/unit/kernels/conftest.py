"""Fixture `built`, which skips a test if there are no built kernels, for example without a
compiler.
"""

import pytest

from hadal.kernels import library
from tests.needs import leave_out


@pytest.fixture(scope="session")
def built() -> None:
    if library.load() is None:
        leave_out("no kernels", "apt-get install g++")
