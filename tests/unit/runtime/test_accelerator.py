"""Test which device a rank gets, and the error if there is none."""

import pytest
import torch

from hadal.core.errors import ConfigError
from hadal.runtime.rank.device import open_device
from tests.needs import skip_unless


def test_a_cpu_is_always_there() -> None:
    assert open_device(None) == "cpu"


@skip_unless(not torch.cuda.is_available(), "there is a GPU", "a machine without a GPU")
def test_a_gpu_that_torch_does_not_see_is_named() -> None:
    with pytest.raises(ConfigError, match="sees no GPU"):
        open_device(0)
