"""Test that private files and folders become ours alone, even if they were open to others."""

from __future__ import annotations

import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from hadal.core.config import Deployment
from hadal.core.errors import ConfigError
from hadal.core.facts import PackedFacts
from hadal.runtime.launch import _run_folder, _secret
from hadal.runtime.ledger.address import ledger_url
from hadal.runtime.ledger.store import Store
from hadal.runtime.process.private import (
    append_private,
    is_private,
    make_private,
    read_private,
    replace_private,
    take_from_others,
)
from hadal.runtime.process.process import RUN_FILE, Run, read_run, remove_stale_folders, write_run
from hadal.runtime.process.status import STATUS_FILE
from hadal.runtime.store.owned_segments import OwnSegments
from hadal.runtime.store.troubles import Troubles


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
    with pytest.raises(ConfigError, match="private to you"):
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


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        read_private(tmp_path / "pipe", "the secret")


@pytest.mark.parametrize(
    ("mode", "owner", "user", "is_fine"),
    [
        (0o100600, 1000, 1000, True),
        (0o100440, 1000, 1000, False),
        (0o100440, 0, 10001, True),
        (0o100640, 0, 10001, True),
        (0o100660, 0, 10001, False),
        (0o100444, 0, 10001, False),
        (0o100440, 0, 0, False),
        (0o100440, 1001, 10001, False),
    ],
)
def test_root_may_let_a_group_read_a_secret(
    mode: int, owner: int, user: int, is_fine: bool
) -> None:
    """Kubernetes mounts secrets like this in pods with an fsGroup."""
    assert is_private(mode, owner, user) is is_fine


@pytest.mark.parametrize("fails", [False, True])
def test_no_secret_stays_in_a_run_folder(tmp_path: Path, fails: bool) -> None:
    with suppress(ConfigError), _run_folder(tmp_path / "run") as folder:
        run = Run("r", Deployment(), secret=b"s" * 32)
        write_run(folder, run)
        (folder / "supervisor.sock").touch()
        (folder / STATUS_FILE).write_text("{}")
        assert read_run(folder) == run
        if fails:
            raise ConfigError("it cannot start")
    assert [path.name for path in folder.iterdir()] == [STATUS_FILE]


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


@pytest.mark.promise(
    "Each deployment has one secret, drawn at start and stored in its 0600 run file"
)
def test_a_deployments_secret_is_drawn_or_read_and_never_short(tmp_path: Path) -> None:
    assert len(_secret(None)) == 32
    assert _secret(None) != _secret(None)
    path = tmp_path / "secret"
    path.write_bytes(b"x" * 15 + b"\n")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="at least 16 bytes"):
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


WRITES = {
    "a file that is replaced": lambda path: replace_private(path, b"new"),
    "a log": lambda path: append_private(path).close(),
    "a ledger": lambda path: take_from_others(path),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("leads_to", ["victim", "absent"])
def test_a_link_is_never_followed(tmp_path: Path, write: str, leads_to: str) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / "victim").chmod(0o644)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / leads_to)
    with pytest.raises(OSError, match=r"link|symbolic"):
        WRITES[write](link)
    assert (tmp_path / "victim").read_bytes() == b"precious"
    assert mode(tmp_path / "victim") == 0o644
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "victim"]


def test_a_pipe_with_a_logs_name_holds_up_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    with pytest.raises(OSError, match=r"link|device|address"):
        append_private(tmp_path / "log")


@pytest.mark.needs("root")
class TestRoot:
    """Tests as root: another account owns the folder, and puts links into it."""

    STRANGER = 4321

    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "theirs"
        folder.mkdir()
        os.chown(folder, self.STRANGER, self.STRANGER)
        return folder

    def test_what_it_writes_there_is_the_folders_owners(self, tmp_path: Path) -> None:
        path = self.folder(tmp_path) / "keys.txt"
        replace_private(path, b"new")
        assert (path.stat().st_uid, mode(path), path.read_bytes()) == (self.STRANGER, 0o600, b"new")

    def test_it_follows_no_link_of_theirs_to_a_folder(self, tmp_path: Path) -> None:
        (tmp_path / "etc").mkdir()
        link = self.folder(tmp_path) / "run"
        link.symlink_to(tmp_path / "etc")
        os.lchown(link, self.STRANGER, self.STRANGER)
        for write in WRITES.values():
            with pytest.raises(OSError, match="another account"):
                write(link / "file")
        (tmp_path / "etc").chmod(0o755)
        with pytest.raises(ConfigError, match="another account"):
            make_private(link)
        assert mode(tmp_path / "etc") == 0o755
        assert not any((tmp_path / "etc").iterdir())

    def test_a_link_of_its_own_is_followed(self, tmp_path: Path) -> None:
        (tmp_path / "disk").mkdir()
        (tmp_path / "state").symlink_to("disk")
        make_private(tmp_path / "state")
        replace_private(tmp_path / "state" / "file", b"new")
        assert (tmp_path / "disk" / "file").read_bytes() == b"new"
        assert mode(tmp_path / "disk") == 0o700

    def test_its_state_is_in_no_folder_of_theirs(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="theirs belongs to another account"):
            make_private(self.folder(tmp_path) / "run")

    def test_it_adds_to_no_file_of_theirs(self, tmp_path: Path) -> None:
        path = self.folder(tmp_path) / "log"
        path.touch(mode=0o600)
        os.chown(path, self.STRANGER, self.STRANGER)
        with pytest.raises(OSError, match="another account"):
            append_private(path)
