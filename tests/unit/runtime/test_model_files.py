"""Test that only the model files that the server was started with are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from hadal.core.config import Deployment
from hadal.core.errors import CheckpointError
from hadal.runtime import model_files
from hadal.runtime.fingerprint import digest_of_model
from hadal.runtime.model_files import check_model, watch_model
from hadal.runtime.process.process import Run
from hadal.runtime.resolve import model_folder
from tests.waiting import wait_until


@pytest.mark.parametrize("change", ["shorter", "another", "gone", "more"])
def test_a_change_is_told_once_with_the_files_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setattr(model_files, "LOOK_S", 0.01)
    shard, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    shard.write_bytes(b"weights")
    reasons: list[str] = []
    watch_model(tmp_path, reasons.append)
    (tmp_path / "README.md").write_text("no weights")
    match change:
        case "shorter":
            shard.write_bytes(b"we")
        case "another":
            other.with_suffix(".new").write_bytes(b"WEIGHTS")
            other.with_suffix(".new").rename(shard)
        case "gone":
            shard.unlink()
        case "more":
            other.write_bytes(b"weights")
    wait_until(lambda: reasons, "it is told")
    name = other.name if change == "more" else shard.name
    assert reasons == [f"{tmp_path}: {name} changed while it was in use."]


@pytest.mark.promise(
    "files with other contents than at the start are refused, so that no two units "
    "compute with different weights"
)
def test_a_process_that_starts_later_reads_the_same_weights_or_none(tmp_path: Path) -> None:
    for path in model_folder("").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    run = Run("r", Deployment(model=str(tmp_path)), model_digest=digest_of_model(tmp_path))
    check_model(run)
    shard = sorted(tmp_path.glob("*.safetensors"))[-1]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match="have changed since this server was started"):
        check_model(run)
