"""A recorded run decided again: equal, or the first difference is named."""

from __future__ import annotations

import io

import msgspec
import pytest

from hadal.commands.replay import make_role
from hadal.core.messages.generation import Deliver, Token
from hadal.core.messages.requests import Submit
from hadal.core.messages.units import Decode, KvLease, Prefill, PrefillDone, UnitUp
from hadal.core.plans import Draw, StepDone
from hadal.core.seams import Send
from hadal.lab.sim.replay import decision_of, replay
from hadal.roles.front.record import Record
from hadal.roles.front.routing import RequestRouting
from hadal.roles.recording import VERSION, Call, MadeFront, Opening, RecordedRole, Recording, parse
from hadal.runtime.recorder import Recorded, Tape
from tests.columns import Row, tokens_message
from tests.fresh import fresh
from tests.unit.lab.sim.recorded import DEPLOYMENT, DRAFTING, record
from tests.unit.roles.driving import generation, of, sent


@pytest.fixture(scope="module")
def recordings() -> list[Recording]:
    return record(seed=1)


@pytest.mark.parametrize("look_s", [0.0, 0.004])
def test_the_same_decisions_in_the_same_order(look_s: float) -> None:
    """Replay runs, also with several events in one call of a role."""
    seed = fresh().randrange(2**31)
    print(f"seed {seed}")
    recordings = record(seed, look_s=look_s)
    assert any(len(call.events) > 1 for r in recordings for call in r.calls) == (look_s > 0.0)
    report = replay(recordings, make_role)
    assert report.difference is None, str(report.difference)
    assert (
        report.num_calls
        == report.num_recorded
        == sum(len(recording.calls) for recording in recordings)
    )
    effects = [
        effect for recording in recordings for call in recording.calls for effect in call.effects
    ]
    assert report.num_decisions == sum(decision_of(effect) is not None for effect in effects)
    assert report.decisions["Prefill"] >= 20
    assert report.decisions["Deliver"] > 100
    assert report.events["Submit"] == 30


def test_steps_of_several_tokens_are_decided_again_alike() -> None:
    seed = fresh().randrange(2**31)
    print(f"seed {seed}")
    recordings = record(seed, deployment=DRAFTING)
    steps = [
        event
        for recording in recordings
        for call in recording.calls
        for event in call.events
        if isinstance(event, StepDone) and recording.opening.process.startswith("decode")
    ]
    assert any(len(set(step.keys)) < len(step.keys) for step in steps), "no draft was right"
    report = replay(recordings, make_role)
    assert report.difference is None, str(report.difference)


def test_measures(recordings: list[Recording]) -> None:
    report = replay(recordings, make_role)
    assert set(report.step_ms) == {"prefill-0", "decode-0", "decode-1"}
    for number, mean_ms in report.step_ms.values():
        assert number > 10
        assert 2.0 <= mean_ms <= 20.0


@pytest.mark.promise(
    "the recorded ones, byte for byte, or the replay ends and names the difference"
)
def test_another_policy_is_noticed(
    recordings: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Change the front's choice of decode unit: the first changed choice is reported."""
    chosen = RequestRouting.decode_unit

    def worst(self: RequestRouting, record: Record) -> str | None:
        unit = chosen(self, record)
        return {"decode-0": "decode-1", "decode-1": "decode-0"}.get(unit or "", unit)

    monkeypatch.setattr(RequestRouting, "decode_unit", worst)
    report = replay(recordings, make_role)
    difference = report.difference
    assert difference is not None
    assert difference.process == "front"
    assert difference.what.endswith(": Decode.to")
    assert {difference.recorded, difference.replayed} == {"'decode-0'", "'decode-1'"}
    (front,) = (recording for recording in recordings if recording.process == "front")
    first = next(
        number
        for number, call in enumerate(front.calls)
        if any(isinstance(e, Send) and isinstance(e.message, Decode) for e in call.effects)
    )
    assert difference.call == first
    assert report.num_calls < report.num_recorded
    others = [recording for recording in recordings if recording.process != "front"]
    assert replay(others, make_role).difference is None


def changed(recordings: list[Recording], process: str, number: int, call: Call) -> list[Recording]:
    """Return the run with one call replaced."""
    return [
        Recording(r.opening, (*r.calls[:number], call, *r.calls[number + 1 :]))
        if r.process == process
        else r
        for r in recordings
    ]


def first_sending(recordings: list[Recording], kind: type) -> tuple[int, Call]:
    (front,) = (recording for recording in recordings if recording.process == "front")
    return next(
        (number, call)
        for number, call in enumerate(front.calls)
        if any(
            isinstance(effect, Send) and isinstance(effect.message, kind) for effect in call.effects
        )
    )


@pytest.mark.promise(
    "the recorded ones, byte for byte, or the replay ends and names the difference"
)
def test_a_message_that_was_not_recorded_is_a_difference(recordings: list[Recording]) -> None:
    """Remove a Prefill from the front's recorded effects: the replay, which sends it, must report
    that.
    """
    number, call = first_sending(recordings, Prefill)
    kept = tuple(
        e for e in call.effects if not (isinstance(e, Send) and isinstance(e.message, Prefill))
    )
    report = replay(
        changed(recordings, "front", number, msgspec.structs.replace(call, effects=kept)), make_role
    )
    assert report.difference is not None
    assert (report.difference.process, report.difference.call) == ("front", number)
    assert "effects, not" in report.difference.what
    assert "Prefill(" in report.difference.replayed


def test_a_change_of_order_is_a_difference(recordings: list[Recording]) -> None:
    """Swap two recorded effects of a call: the replay must name this call."""
    (front,) = (recording for recording in recordings if recording.process == "front")
    number, call = next(
        (n, c)
        for n, c in enumerate(front.calls)
        if len(c.effects) > 1 and c.effects[0] != c.effects[1]
    )
    swapped = (call.effects[1], call.effects[0], *call.effects[2:])
    report = replay(
        changed(recordings, "front", number, msgspec.structs.replace(call, effects=swapped)),
        make_role,
    )
    assert report.difference is not None
    assert (report.difference.process, report.difference.call) == ("front", number)


def test_a_recording_that_was_cut_off_is_replayed_as_far_as_it_goes(
    recordings: list[Recording],
) -> None:
    """Cut recordings, as `kill -9` of one process or of the whole run does."""
    cut = [
        Recording(r.opening, r.calls[: len(r.calls) // 2]) if r.process == "decode-1" else r
        for r in recordings
    ]
    report = replay(cut, make_role)
    assert report.difference is None, str(report.difference)
    some = [Recording(r.opening, r.calls[:40]) for r in recordings]
    assert replay(some, make_role).difference is None


def test_what_a_role_raises_is_compared(recordings: list[Recording]) -> None:
    class Broken:
        def __init__(self, role: RecordedRole) -> None:
            self.start = role.start

        def handle(self, now_s: float, *events: object) -> list[object]:
            raise RuntimeError("no")

    def broken(opening: Opening) -> RecordedRole:
        return Broken(make_role(opening)) if opening.process == "prefill-0" else make_role(opening)

    report = replay(recordings, broken)
    assert report.difference is not None
    assert (report.difference.process, report.difference.call) == ("prefill-0", 1)
    assert report.difference.replayed == "RuntimeError: no"
    (prefill,) = (recording for recording in recordings if recording.process == "prefill-0")
    raised = msgspec.structs.replace(prefill.calls[1], effects=(), error="RuntimeError: no")
    ends = Recording(prefill.opening, (prefill.calls[0], raised))
    assert replay([ends], broken).difference is None


def test_nothing_to_replay(recordings: list[Recording]) -> None:
    with pytest.raises(ValueError, match="the recording is empty"):
        replay([Recording(recordings[0].opening, ())], make_role)


def test_messages_with_several_tokens_of_a_request_are_decided_again() -> None:
    """Record and replay two Tokens messages with several rows per request. The rows include a
    duplicate, a gap in the indices, and an end before further rows.
    """
    file = io.BytesIO()
    opening = Opening(VERSION, "run", "front", MadeFront("f", 2048, ""), DEPLOYMENT)
    tape = Tape(file.write)
    tape.write(opening)
    front, lease = Recorded(make_role(opening), tape), KvLease("pool", (1,), (0,), 9)
    front.start(0.0)
    front.handle(0.1, UnitUp("prefill-0", "prefill", "p", 40, 6))
    front.handle(0.1, UnitUp("decode-0", "decode", "d", 40, 6))
    ids = []
    for at_s, name in ((0.2, "a"), (0.25, "b"), (0.3, "c")):
        front.handle(at_s, Submit(generation(name, 62, max_tokens=90)))
        effects = front.handle(at_s + 0.02, PrefillDone("prefill-0", Token(name, 0, 0, 5), lease))
        ids += [decode.generation.attempt_id for decode in sent(effects, Decode)]
    a, b, c = ids
    first: list[Row] = [(one, index, 6 + index, None) for index in (1, 2, 3) for one in (a, b)]
    second: list[Row] = [(c, 1, 7, None), (a, 3, 9, None), (a, 4, 10, "stop"), (c, 3, 9, None)]
    draws = {1: Draw(-0.5, ()), 4: Draw(-1.5, ((9, -1.5),))}
    front.handle(0.4, tokens_message("decode-0", first, draws))
    front.handle(0.5, tokens_message("decode-0", [*second, (c, 2, 8, None), (b, 4, 10, None)]))
    recording = parse(file.getvalue())
    assert [len(of(call.effects, Deliver)) for call in recording.calls[-2:]] == [2, 3]
    report = replay([recording], make_role)
    assert report.difference is None, str(report.difference)
    assert report.events["Tokens"] == 2


def test_a_part_of_a_run_is_decided_again_by_itself(recordings: list[Recording]) -> None:
    """Replay without one recording, as if a host of several had lost it."""
    for process in sorted({recording.process for recording in recordings}):
        part = [recording for recording in recordings if recording.process != process]
        report = replay(part, make_role)
        assert report.difference is None
        assert report.num_calls == sum(len(recording.calls) for recording in part)
