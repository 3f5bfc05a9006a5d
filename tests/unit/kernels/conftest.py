"""Most tests here need the built kernels; where no compiler is, they are skipped and the fallback's
own tests still run.
"""

import pytest

from hadal.kernels import library


@pytest.fixture(scope="session")
def built() -> None:
    if library.load() is None:
        pytest.skip("no kernels on this machine (the log says why)")
