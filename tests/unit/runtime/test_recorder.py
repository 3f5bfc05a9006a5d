"""Test the recorder: it does nothing unless asked; otherwise it writes every call at once, readable
only by the owner, without a secret.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import pytest

from hadal.core.config import BatchesConfig, Deployment, LedgerConfig
from hadal.core.errors import ConfigError
from hadal.core.messages.units import Cancel
from hadal.core.seams import Effect, Event, Tick, WakeAt
from hadal.roles.recording import (
    VERSION,
    Call,
    MadeFleet,
    MadeFront,
    Opening,
    RecordingError,
    frame,
    parse,
)
from hadal.runtime.recorder import RECORD, Recorded, Tape, read_recordings, recorded

URL = "postgresql://user:secret@host/name"
DEPLOYMENT = Deployment(model="m", ledger=LedgerConfig(url=URL), batches=BatchesConfig(url=URL))
MADE = MadeFront("e", 4096, "")


@dataclass
class Role:
    """Role that asks to be woken, and raises on a Cancel."""

    is_up: bool = False

    def start(self, now_s: float) -> list[Effect]:
        self.is_up = True
        return [WakeAt(now_s + 1)]

    def handle(self, now_s: float, *events: Event) -> list[Effect]:
        if any(isinstance(event, Cancel) for event in events):
            raise KeyError("gone")
        return [WakeAt(now_s + 1)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RECORD, str(tmp_path / "records"))
    return tmp_path / "records"


def test_nothing_happens_unless_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for value in ("", None):
        monkeypatch.delenv(RECORD, raising=False) if value is None else monkeypatch.setenv(
            RECORD, value
        )
        role = Role()
        assert recorded(role, "front", MADE, "run", DEPLOYMENT) is role
        assert vars(role) == {"is_up": False}  # No method of the role is wrapped.
    assert list(tmp_path.iterdir()) == []


@pytest.mark.promise(
    "every process that hosts a role records how the role was made, and each call: "
    "its time, its input and its output"
)
def test_every_call_is_written_at_once(folder: Path) -> None:
    inner = Role()
    role = recorded(inner, "front", MADE, "run", DEPLOYMENT)
    assert role.start(1.0) == [WakeAt(2.0)]
    assert vars(inner) == {"is_up": True}  # The role was called, and has no other change.
    assert role.handle(2.0, Tick()) == [WakeAt(3.0)]
    (recording,) = read_recordings(folder)
    assert recording.calls == (Call(1.0, (), (WakeAt(2.0),)), Call(2.0, (Tick(),), (WakeAt(3.0),)))
    assert (recording.process, recording.opening.made, recording.opening.run_id) == (
        "front",
        MADE,
        "run",
    )
    with pytest.raises(KeyError):
        role.handle(3.0, Cancel("a", 0))
    (recording,) = read_recordings(folder)
    assert recording.calls[2:] == (Call(3.0, (Cancel("a", 0),), (), "KeyError: 'gone'"),)


@pytest.mark.promise("only its owner can read it")
def test_it_is_for_its_owner_and_holds_no_secret(folder: Path) -> None:
    recorded(Role(), "front", MADE, "run", DEPLOYMENT)
    (path,) = folder.iterdir()
    assert path.name == f"front-{os.getpid()}.rec"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert b"secret" not in path.read_bytes()
    assert parse(path.read_bytes()).opening.deployment.model == "m"


def test_a_folder_that_cannot_be_used_is_said(folder: Path) -> None:
    recorded(Role(), "front", MADE, "run", DEPLOYMENT)
    with pytest.raises(ConfigError, match="exists already: set HADAL_RECORD to an empty folder"):
        recorded(Role(), "front", MADE, "run", DEPLOYMENT)


def test_a_full_disk_ends_the_recording_and_not_the_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    tape = Tape(full)
    handle = Recorded(Role(), tape).handle
    assert handle(1.0, Tick()) == [WakeAt(2.0)]
    assert handle(2.0, Tick()) == [WakeAt(3.0)]
    assert caplog.text.count("the recording is incomplete") == 1


def test_reading_a_folder(tmp_path: Path) -> None:
    def put(name: str, run_id: str, process: str, at_s: float) -> None:
        opening = Opening(VERSION, run_id, process, MadeFleet(0.0), DEPLOYMENT)
        (tmp_path / name).write_bytes(frame(opening) + frame(Call(at_s, (), ())))

    with pytest.raises(RecordingError, match=r"has no \.rec files: serve with HADAL_RECORD="):
        read_recordings(tmp_path)
    put("decode-0-9.rec", "a", "decode-0", 5.0)
    put("decode-0-10.rec", "a", "decode-0", 7.0)
    put("a.rec", "a", "front", 6.0)
    assert [(r.process, r.calls[0].now_s) for r in read_recordings(tmp_path)] == [
        ("decode-0", 5.0),
        ("decode-0", 7.0),
        ("front", 6.0),
    ]
    put("b.rec", "b", "front", 6.0)
    with pytest.raises(RecordingError, match="several runs"):
        read_recordings(tmp_path)
    (tmp_path / "b.rec").write_bytes(b"\0\0\0\x01x")
    with pytest.raises(RecordingError, match=r"b\.rec: it is not a recording"):
        read_recordings(tmp_path)
