"""Test which GPU a process uses."""

import pytest

from hadal.runtime import devices
from hadal.runtime.devices import VISIBLE, take_gpu


@pytest.mark.parametrize(
    ("visible", "index", "taken"),
    [
        ("0,1,2,3", 2, "2"),
        ("4, 5", 3, "5"),
        ("GPU-a,GPU-b", 1, "GPU-b"),
        ("", 1, ""),
        (None, 3, "1"),
    ],
)
def test_gpus_are_counted_round(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, index: int, taken: str
) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: (1 << 30, 1 << 30))
    monkeypatch.setenv(VISIBLE, visible or "")
    if visible is None:
        monkeypatch.delenv(VISIBLE)
    take_gpu(index)
    assert devices.os.environ[VISIBLE] == taken
