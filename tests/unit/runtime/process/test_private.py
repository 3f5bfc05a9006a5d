"""What is ours alone, also where it was there before and open to others."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest

from hadal.core.config import Deployment
from hadal.core.errors import ConfigError
from hadal.core.facts import PackedFacts
from hadal.runtime.launch import _secret
from hadal.runtime.ledger.store import Store, ledger_url
from hadal.runtime.process.private import (
    append_private,
    make_private,
    read_private,
    take_from_others,
)
from hadal.runtime.process.process import RUN_FILE, Run, remove_stale_folders, write_run
from hadal.runtime.store.segments import OwnSegments, Troubles


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_folder_is_made_private_whether_it_was_there_or_not(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    old.chmod(0o755)
    for folder in (old, tmp_path / "new" / "deep"):
        make_private(folder)
        assert mode(folder) == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="for you alone"):
        make_private(tmp_path / "file" / "below")


@pytest.mark.parametrize("is_there", [False, True])
def test_a_log_is_added_to_and_its_owners(tmp_path: Path, is_there: bool) -> None:
    path = tmp_path / "gateway.log"
    if is_there:
        path.write_bytes(b"before\n")
        path.chmod(0o644)
    with append_private(path) as log:
        log.write(b"now\n")
    assert path.read_bytes() == (b"before\n" if is_there else b"") + b"now\n"
    assert mode(path) == 0o600


def test_a_secret_that_others_may_read_is_none(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"  thirty-two bytes or so of secret\n")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
        read_private(path, "the secret")
    path.chmod(0o600)
    assert read_private(path, "the secret") == b"thirty-two bytes or so of secret"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_private(tmp_path / "absent", "the secret")


def test_what_killed_supervisors_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = {
        name: tmp_path / f"hadal-{name}" for name in ("killed", "lives", "agent", "starts", "other")
    }
    for name, folder in folders.items():
        folder.mkdir()
        if name != "other":
            write_run(folder, Run("r", Deployment()))
            if name != "starts":
                os.utime(folder / RUN_FILE, (0, 0))
    (folders["killed"] / "supervisor.sock").touch()
    with socket.socket(socket.AF_UNIX) as supervisor, socket.socket(socket.AF_UNIX) as agent:
        for listener, path in ((supervisor, "lives/supervisor"), (agent, "agent/node-0-1234")):
            listener.bind(f"{tmp_path}/hadal-{path}.sock")
            listener.listen()
        remove_stale_folders()
    assert {name for name, folder in folders.items() if folder.exists()} == {
        "lives",
        "agent",
        "starts",
        "other",
    }


@pytest.mark.promise("One secret a deployment, drawn at start, stands in its 0600 run file")
def test_a_deployments_secret_is_drawn_or_read_and_never_short(tmp_path: Path) -> None:
    assert len(_secret(None)) == 32
    assert _secret(None) != _secret(None)
    path = tmp_path / "secret"
    path.write_bytes(b"x" * 15 + b"\n")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="16 bytes at least"):
        _secret(path)
    path.write_bytes(b"x" * 16 + b"\n")
    assert _secret(path) == b"x" * 16


@pytest.mark.parametrize("is_there", [False, True])
def test_a_ledger_is_its_owners_whoever_made_its_folder(tmp_path: Path, is_there: bool) -> None:
    tmp_path.chmod(0o755)
    path = tmp_path / "ledger.sqlite"
    if is_there:
        path.touch(mode=0o644)
        path.chmod(0o644)
    store = Store(ledger_url(str(path)))
    store.prepare()
    store.write(PackedFacts())
    files = [found for found in tmp_path.iterdir() if found.name.startswith(path.name)]
    assert path in files
    assert {mode(found) for found in files} == {0o600}
    store.close()


def test_what_is_everybodys_is_refused_and_let_be(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(ConfigError, match="for all users"):
        make_private(tmp_path)
    take_from_others(tmp_path)
    assert mode(tmp_path) == 0o777


def test_a_cache_folder_that_was_open_is_closed_if_it_holds_nothing_else(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "letters").touch()
    own = OwnSegments(tmp_path, "model", 4096, 1 << 20, 1 << 20, Troubles(tmp_path))
    own.enter()
    assert mode(tmp_path) == 0o755
    (tmp_path / "letters").unlink()
    own.enter()
    assert mode(tmp_path) == 0o700
