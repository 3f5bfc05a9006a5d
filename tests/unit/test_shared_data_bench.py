"""Missing data: the error says what to do, and where the data is published."""

from pathlib import Path

import pytest

from bench.shared_data import (
    AZURE,
    EXPERT_LOADS,
    MOONCAKE,
    NAME_TO_SOURCE,
    VARIABLE,
    find,
    shared_data,
    why_missing,
)


def test_what_is_missing_is_named_with_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / EXPERT_LOADS).mkdir()
    assert find(EXPERT_LOADS) == tmp_path / EXPERT_LOADS
    assert find(AZURE) is None
    assert why_missing(EXPERT_LOADS) == ""
    said = why_missing(*NAME_TO_SOURCE)
    assert f"{VARIABLE} names no folder with {MOONCAKE}" in said
    assert "kvcache-ai/Mooncake" in said
    assert EXPERT_LOADS not in said


def test_a_name_of_no_folder_is_a_mistake_not_an_absence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "typo"))
    with pytest.raises(SystemExit, match="typo, which is no folder"):
        shared_data()
