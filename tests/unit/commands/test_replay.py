"""`hadal replay`: its output, its exit codes, and the roles that it makes."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from hadal.cli import app
from hadal.commands.replay import make_role
from hadal.core.config import Deployment, FleetConfig, UnitsConfig
from hadal.core.seams import WakeAt
from hadal.roles.decode.leader import DecodeLeader
from hadal.roles.fleet.fleet import Fleet
from hadal.roles.front.front import Front
from hadal.roles.prefill.leader import PrefillLeader
from hadal.roles.ranks.rank import RankRole
from hadal.roles.ranks.ranks import RankedLeader
from hadal.roles.recording import (
    VERSION,
    Made,
    MadeFleet,
    MadeFront,
    MadeLeader,
    MadeRank,
    MadeSoleLeader,
    Opening,
    Recording,
    frame,
)
from tests.unit.lab.sim.recorded import MODEL, record


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["replay", *arguments], env={"COLUMNS": "120"})


@pytest.fixture(scope="module")
def recordings() -> list[Recording]:
    return record(seed=2, num_requests=8)


def write(folder: Path, recordings: list[Recording]) -> str:
    for recording in recordings:
        data = b"".join(map(frame, (recording.opening, *recording.calls)))
        (folder / f"{recording.process}-1.rec").write_bytes(data)
    return str(folder)


@pytest.mark.promise(
    "exit code 0: all decisions are the same, in the same order; 1: prints the first difference"
)
def test_the_same(recordings: list[Recording], tmp_path: Path) -> None:
    folder = write(tmp_path, recordings)
    shown = call(folder)
    assert shown.exit_code == 0, shown.output
    assert "The same:" in shown.output
    assert "of 4 roles" in shown.output
    assert "Submit 8" in shown.output
    report = json.loads(call(folder, "--json").output)
    assert report["is_same"] is True
    assert report["calls"] == report["calls_recorded"] == sum(len(r.calls) for r in recordings)
    assert report["decisions"]["Prefill"] > 0
    assert report["steps"]["prefill-0"]["steps"] > 0
    assert report["events"]["Submit"] == 8


@pytest.mark.promise(
    "exit code 0: all decisions are the same, in the same order; 1: prints the first difference"
)
@pytest.mark.promise(
    "the recorded ones, byte for byte, or the replay ends and names the difference"
)
def test_different(recordings: list[Recording], tmp_path: Path) -> None:
    first = recordings[-1]
    calls = (msgspec.structs.replace(first.calls[0], effects=(WakeAt(1.0),)), *first.calls[1:])
    folder = write(tmp_path, [*recordings[:-1], Recording(first.opening, calls)])
    shown = call(folder)
    assert shown.exit_code == 1
    assert "Different" in shown.output
    assert "front, call 0" in shown.output
    report = json.loads(call(folder, "--json").output)
    assert report["is_same"] is False
    assert report["difference"].startswith("front, call 0")


def test_nothing_there(tmp_path: Path) -> None:
    shown = call(str(tmp_path))
    assert shown.exit_code == 2
    assert "has no .rec files" in shown.stderr


@pytest.mark.promise(
    "every process that hosts a role records how the role was made, and each call: "
    "its time, its input and its output"
)
@pytest.mark.parametrize(
    ("process", "made", "kind"),
    [
        ("front", MadeFront("e", 4096, ""), Front),
        ("prefill-0", MadeSoleLeader("prefill", "e", "pool", "", MODEL), PrefillLeader),
        ("decode-0", MadeSoleLeader("decode", "e", "pool", "", MODEL), DecodeLeader),
        ("decode-0", MadeLeader("decode", "e", "", MODEL), RankedLeader),
        ("decode-0.1", MadeRank("decode-0", 1, "e", "host", 1, "pool", 0), RankRole),
        ("supervisor", MadeFleet(5.0), Fleet),
    ],
)
def test_every_kind_of_role_is_made(process: str, made: Made, kind: type) -> None:
    units = UnitsConfig(ranks=2 if isinstance(made, MadeLeader) else 1, kv_blocks=20)
    deployment = Deployment(model="m", prefill=units, decode=units, fleet=FleetConfig(mode="auto"))
    role = make_role(Opening(VERSION, "run", process, made, deployment))
    assert type(role) is kind
    assert role.start(1.0)
