"""Most tests here need the built kernels; where no compiler is, they are skipped and the fallback's
own tests still run.
"""

import pytest

from hadal.kernels import library
from tests.needs import leave_out


@pytest.fixture(scope="session")
def built() -> None:
    if library.load() is None:
        leave_out("no kernels", "apt-get install g++")
