"""Test the leader's process without its ranks: the test plays them, message by message."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from hadal.core.config import Deployment, UnitsConfig
from hadal.core.messages.ranks import RankDone, RankForm, RankFormed, RankHeartbeat, RankUp
from hadal.core.messages.units import Sighting, UnitDown, UnitReport, UnitUp
from hadal.core.model_config import read_model_config
from hadal.core.plans import Formed, OpTime, StepDone
from hadal.core.seams import Effect, Send, Tick
from hadal.roles.ranks.ranks import make_ranked_leader
from hadal.runtime.compute import IDLE
from hadal.runtime.resolve import plan
from hadal.runtime.unit import Spoken
from tests.waiting import DEADLINE_S

SOURCE = Path(__file__).resolve().parents[3] / "src"


def make(role: str) -> Spoken:
    units = UnitsConfig(ranks=2, max_requests=4, kv_blocks=70)
    deployment = plan(Deployment(device="cpu", prefill=units, decode=units)).deployment
    model = read_model_config(Path(deployment.model))
    ranked = make_ranked_leader(deployment, model, f"{role}-0", role, "e1")
    leader = Spoken(ranked, ranked)
    assert not [e for e in leader.start(0.0) if isinstance(e, Send)], (
        "nobody knows the unit before its ranks are there"
    )
    return leader


def up(role: str, rank: int, epoch: str = "a") -> RankUp:
    return RankUp(
        f"{role}-0", rank, f"{epoch}{rank}", "127.0.0.1", 1, f"hadal-r.{role}-0.{rank}.{epoch}"
    )


def formed(rank: int, formation: int, num_loaded: int = 0, epoch: str = "a") -> RankFormed:
    return RankFormed(rank, f"{epoch}{rank}", Formed(formation, None, num_loaded=num_loaded))


def forms(effects: list[Effect]) -> list[str]:
    return [e.to for e in effects if isinstance(e, Send) and isinstance(e.message, RankForm)]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_unit_is_up_when_its_ranks_have_formed(
    role: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    leader = make(role)
    assert forms(leader.handle(1.0, up(role, 0))) == []
    assert forms(leader.handle(1.1, up(role, 1))) == [f"{role}-0.0", f"{role}-0.1"]
    assert not [e for e in leader.handle(1.2, formed(0, 1, num_loaded=3)) if isinstance(e, Send)]
    effects = leader.handle(1.3, formed(1, 1, num_loaded=4))
    told = {e.to for e in effects if isinstance(e, Send) and isinstance(e.message, UnitUp)}
    assert told == {"front", "supervisor"}
    assert "done in" in caplog.text
    assert "with ranks 0, 1; 7 copies of experts were read" in caplog.text


def test_the_unit_goes_on_without_a_rank_and_says_what_it_took(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    leader = make("decode")
    for message in (up("decode", 0), up("decode", 1), formed(0, 1), formed(1, 1)):
        leader.handle(1.0, message)
    assert forms(leader.handle(1.2, UnitDown("decode-0.1", "killed by SIGKILL"))) == ["decode-0.0"]
    leader.handle(1.45, formed(0, 2, num_loaded=384))
    assert (
        "formation 2 done in 0.250 s with ranks 0, without 1; 384 copies of experts were read"
        in caplog.text
    )
    assert "rank 1 is gone (killed by SIGKILL): the others go on without it" in caplog.text


def test_a_silent_rank_is_to_be_killed() -> None:
    leader = make("decode")
    for message in (up("decode", 0), up("decode", 1), formed(0, 1), formed(1, 1)):
        leader.handle(1.0, message)
    effects: list[Effect] = []
    for tenth in range(11, 31):
        now_s = tenth / 10
        effects += leader.handle(now_s, RankHeartbeat(0, "a0", 1, tenth, False))
        effects += leader.handle(now_s, Sighting("decode-0.1", 0.5, is_stopped=False))
        effects += leader.handle(now_s, Tick())
    killed = [
        (e.to, e.message.unit)
        for e in effects
        if isinstance(e, Send) and isinstance(e.message, UnitDown)
    ]
    assert killed == [("supervisor", "decode-0.1")]


def test_its_load_tells_how_long_the_ranks_stood_idle() -> None:
    leader = make("decode")
    for message in (up("decode", 0), up("decode", 1), formed(0, 1), formed(1, 1)):
        leader.handle(1.0, message)
    done = StepDone(
        0, (), (), {}, 0.01, op_times=(OpTime("experts", 3, 0.1), OpTime(IDLE, 1, 0.004))
    )
    for _ in range(100):
        leader.handle(1.1, RankDone(0, "a0", 1, done))
    loads = [
        e.message
        for e in leader.handle(2.0, Tick())
        if isinstance(e, Send) and isinstance(e.message, UnitReport)
    ]
    assert [load.overhead_ms for load in loads] == pytest.approx([4.0], rel=0.01)
    assert (loads[0].num_ranks, loads[0].formation) == (2, 1)


def test_it_loads_no_torch() -> None:
    code = "import sys, hadal.runtime.unit; assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=SOURCE,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
