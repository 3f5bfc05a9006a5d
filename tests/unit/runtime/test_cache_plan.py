"""Test what is reported about a cache before anything starts."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hadal.core.config import CacheConfig, Deployment
from hadal.core.errors import ConfigError
from hadal.runtime.banner import Banner
from hadal.runtime.cache_folder import absolute_folder, make_cache_folder
from hadal.runtime.plan_rows import cache_rows
from hadal.runtime.process.status import Status
from hadal.runtime.resolve import Resolved, plan


def planned(**fields: Any) -> Resolved:
    return plan(Deployment(cache=CacheConfig(**fields)))


def rows(resolved: Resolved) -> dict[str, str]:
    return dict(cache_rows(resolved.deployment, resolved.memory))


def test_memory_and_disk_are_said_in_blocks_and_tokens(tmp_path: Path) -> None:
    resolved = planned(folder=str(tmp_path / "kv"), disk_mb=100)
    num_blocks = resolved.memory.prefill.kv_blocks - 1
    on_disk = 100 * 2**20 // resolved.memory.block_bytes
    assert rows(resolved)["memory"].startswith(
        f"{num_blocks} blocks of a prefill rank, {num_blocks * 64} tokens"
    )
    assert rows(resolved)["disk"].endswith(
        f"{tmp_path / 'kv'}: about {on_disk} blocks, {on_disk * 64} tokens"
    )
    assert not (tmp_path / "kv").exists(), "a plan makes nothing"
    assert resolved.memory.warnings == ()


def test_what_is_off_is_said() -> None:
    assert list(rows(planned(memory="off"))) == ["off"]
    assert rows(planned())["disk"] == "nothing: cache.folder is empty"
    assert rows(planned(memory="off", folder="x"))["memory"].startswith("nothing")


def test_the_banner_says_it_too() -> None:
    banner = Banner(planned(), needs_key=False)
    shown = banner.rows(Status("http://here", "run", 1, False, False, 1.0, {}))
    at = [name for name, _ in shown].index("cache")
    assert shown[at][1].startswith("memory: ")
    assert shown[at + 1] == ("", "disk: nothing: cache.folder is empty")


def test_a_folder_is_the_same_for_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (
        absolute_folder("kv")
        == absolute_folder("~/kv")
        == planned(folder="kv").deployment.cache.folder
    )
    assert absolute_folder("kv") == str(tmp_path / "kv")
    assert absolute_folder("") == ""


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "kv").touch()
    with pytest.raises(ConfigError, match="is not a folder"):
        planned(folder=str(tmp_path / "kv"))


@pytest.mark.parametrize(
    ("folder", "why"),
    [("~no-such-account/kv", "has no home"), ("a\0b", "unprintable characters")],
)
def test_a_folder_that_can_never_be_is_refused(folder: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        planned(folder=folder)


@pytest.mark.promise("Only their owner can read them (0600, in a folder made 0700).")
def test_a_start_makes_the_folder_for_its_owner_alone(tmp_path: Path) -> None:
    make_cache_folder("")
    make_cache_folder(str(tmp_path / "kv"))
    make_cache_folder(str(tmp_path / "kv"))
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    assert list((tmp_path / "kv").iterdir()) == []


def test_a_start_ends_where_nothing_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError,
        match=r"cannot be used \(Not a directory\). Name a folder that you may write to",
    ):
        make_cache_folder(str(tmp_path / "file" / "kv"))

    def fail(number: int) -> None:
        def file(dir: Path) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(tempfile, "TemporaryFile", file)

    fail(errno.EACCES)
    with pytest.raises(ConfigError, match="Permission denied"):
        make_cache_folder(str(tmp_path))
    for number in (
        errno.ENOSPC,
        errno.EROFS,
    ):  # Space may be free later, and stored blocks can be read now.
        fail(number)
        make_cache_folder(str(tmp_path))


def test_a_disk_that_cannot_hold_it_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs
    little = SimpleNamespace(f_bavail=1, f_frsize=2**20)
    monkeypatch.setattr(
        os, "statvfs", lambda path: little if Path(path) == tmp_path else real(path)
    )
    (warning,) = planned(folder=str(tmp_path), disk_mb=3).memory.warnings
    assert "are free in" in warning
    # Existing segments are overwritten: a full cache starts again without a warning.
    (tmp_path / "segment").write_bytes(bytes(2 * 2**20))
    assert planned(folder=str(tmp_path), disk_mb=3).memory.warnings == ()


def test_a_folder_that_everybody_writes_to_is_a_warning(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    (warning,) = planned(folder=str(tmp_path), disk_mb=1).memory.warnings
    assert "false KV" in warning
    tmp_path.chmod(0o777)  # The folder is ours, and open by accident: it is closed on use.
    assert planned(folder=str(tmp_path), disk_mb=1).memory.warnings == ()
    tmp_path.chmod(0o1777)
    assert planned(folder=str(tmp_path / "kv"), disk_mb=1).memory.warnings == (), (
        "that one we make ourselves"
    )
    tmp_path.chmod(0o770)
    assert planned(folder=str(tmp_path), disk_mb=1).memory.warnings == ()


def test_a_folder_that_takes_or_tells_nothing_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # Root may write everywhere.
    (warning,) = planned(folder=str(tmp_path)).memory.warnings
    assert "cannot be written to" in warning
    monkeypatch.undo()

    def fails(path: Path) -> os.statvfs_result:
        raise OSError(116, "Stale file handle")

    real = os.statvfs
    monkeypatch.setattr(
        os, "statvfs", lambda path: fails(path) if Path(path) == tmp_path else real(path)
    )
    (warning,) = planned(folder=str(tmp_path)).memory.warnings
    assert "Stale file handle" in warning


def test_less_than_a_block_is_a_warning(tmp_path: Path) -> None:
    config = Path(__file__).resolve().parents[3] / "configs" / "deepseek_v3"
    (warning,) = [
        text
        for text in plan(
            Deployment(model=str(config), cache=CacheConfig(folder=str(tmp_path), disk_mb=1))
        ).memory.warnings
        if "cache" in text
    ]
    assert "less than one block" in warning
