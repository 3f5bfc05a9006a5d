"""Skip this folder's tests without a compiler: they need built kernels."""

import pytest

from hadal.kernels import library
from tests.needs import leave_out


@pytest.fixture(scope="session")
def built() -> None:
    if library.load() is None:
        leave_out("no kernels", "apt-get install g++")
