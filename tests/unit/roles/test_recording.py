"""Test a recording's bytes: complete except for a torn last frame; other files are refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from hadal.core.config import Deployment
from hadal.core.messages.generation import Generation
from hadal.core.messages.requests import Submit
from hadal.core.messages.units import Cancel
from hadal.core.plans import DecodePlan, Draw, Join, Sampling, StepDone
from hadal.core.seams import DiskNews, Effect, Execute, RankReset, Send, Tick, WakeAt
from hadal.roles.ranks.rank import RankProgress
from hadal.roles.recording import (
    VERSION,
    Call,
    MadeFront,
    Opening,
    RecordingError,
    canonical,
    frame,
    parse,
)
from tests.columns import tokens_message

DRAW = Draw(-1.5, ())
OPENING = Opening(VERSION, "run", "front", MadeFront("e", 4096, "f"), Deployment(model="m"))
CALLS = (
    Call(1.5, (), (WakeAt(2.5), Send("front", Cancel("a", 1)))),
    Call(2.5, (Tick(), RankReset((), (0,), ("pool",), 1), DiskNews(b"n", (), b"")), ()),
    Call(
        3.0,
        (Submit(Generation("a", (1, 2), (), 5, (), 0, Sampling(), 0)), RankProgress(3, True, (1,))),
        (),
    ),
    Call(
        3.5,
        (StepDone(0, (0,), (7,), {}, 0.25),),
        (Execute((DecodePlan(1, (), (), ()),)),),
        "ValueError: no",
    ),
    Call(
        4.0,
        (
            StepDone(
                1, (3, 0, 3), (7, 8, 9), {0: Draw(-0.5, ((7, -0.5),)), 2: Draw(-1.5, ())}, 0.25
            ),
        ),
        (Send("front", tokens_message("d", [(5, 1, 7, None), (5, 2, 9, "stop")], {1: DRAW})),),
    ),
)
DATA = b"".join(map(frame, (OPENING, *CALLS)))


def test_everything_comes_back() -> None:
    recording = parse(DATA)
    assert (recording.opening, recording.calls, recording.process) == (OPENING, CALLS, "front")


def test_a_last_frame_that_was_cut_off_is_left_out() -> None:
    whole = len(DATA) - len(frame(CALLS[-1]))
    for end in range(whole, len(DATA)):
        assert parse(DATA[:end]).calls == CALLS[:-1]


@pytest.mark.parametrize("data", [b"", b"\0\0\0", frame(OPENING)[:-1]])
def test_nothing_written_is_refused(data: bytes) -> None:
    with pytest.raises(RecordingError, match="before its role began"):
        parse(data)


def test_what_is_no_recording_is_refused() -> None:
    with pytest.raises(RecordingError, match="not a recording"):
        parse(b"\0\0\0\x05hello")
    with pytest.raises(RecordingError, match="not a recording"):
        parse(b"a text of something else")
    with pytest.raises(RecordingError, match=f"version is {VERSION + 1}"):
        parse(frame(msgspec.structs.replace(OPENING, version=VERSION + 1)))


def test_what_never_left_a_process_is_written_as_the_wire_would() -> None:
    """A leader's own plans contain numpy numbers; a simulated prompt is a range."""

    def call(slot: int, prompt: tuple[int, ...]) -> Call:
        join = Join(slot, (1,), 3, 4, 1, Sampling(), prompt=prompt)
        effect: Effect = Execute((DecodePlan(0, (), (join,), ()),))
        return Call(0.0, (), (effect,))

    made = call(np.int64(5), range(3))  # type: ignore[arg-type]
    assert canonical(made) == canonical(call(5, (0, 1, 2)))
    assert canonical(made) != canonical(call(6, (0, 1, 2)))
    with pytest.raises(NotImplementedError, match="object cannot be recorded"):
        canonical(call(5, object()))  # type: ignore[arg-type]


def test_canonical_forgets_what_no_reader_sees() -> None:
    assert canonical(Call(0, (), (WakeAt(1),))) == canonical(Call(0.0, (), (WakeAt(1.0),)))
    nan = float("nan")
    assert canonical(Call(0.0, (), (WakeAt(nan),))) == canonical(Call(0.0, (), (WakeAt(nan),)))
    assert canonical(Call(0.0, (), (WakeAt(1.0),))) != canonical(
        Call(0.0, (), (WakeAt(1.0 + 2**-52),))
    )
