"""Test log lines about starting processes: one every 10 s, as long as there are any."""

from __future__ import annotations

import logging

import pytest

from hadal.runtime.process.child import Child, ProcessPhase
from hadal.runtime.process.logs import Doing
from hadal.runtime.process.relay import OutputRelay
from hadal.runtime.process.starting import Starting


def children(*names: str) -> list[Child]:
    made = [Child(name, name.partition("-")[0], [], OutputRelay(name, None)) for name in names]
    for child in made:
        child.phase = ProcessPhase.STARTING
    return made


@pytest.mark.promise("Long operations report their progress on stderr.")
def test_the_log_tells_of_a_long_start(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    gateway, prefill, decode = those = children("gateway", "prefill-0", "decode-0")
    starting = Starting(those, has_bar=False)
    starting.look(100.0)
    gateway.is_ready(101.0)
    prefill.progress.doing = Doing("reads the model's weights", 20, 61)
    starting.look(105.0)
    assert caplog.messages == []
    starting.look(110.0)
    starting.look(110.5)
    assert caplog.messages == [
        "1 of 3 processes are ready; prefill-0 reads the model's weights (33%); decode-0 starts"
    ]
    for child in those:
        child.is_ready(111.0)
    starting.look(125.0)
    decode.phase = ProcessPhase.STARTING
    starting.look(200.0)
    assert len(caplog.messages) == 1
    starting.look(210.0)
    assert caplog.messages[1:] == ["2 of 3 processes are ready; decode-0 starts"]


def test_many_are_counted_and_those_that_rest_are_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    *those, resting = children(*(f"decode-0.{rank}" for rank in range(7)), "decode-1")
    resting.phase = ProcessPhase.WAITING
    resting.dismiss()
    starting = Starting([*those, resting], has_bar=False)
    starting.look(0.0)
    starting.look(10.0)
    (text,) = caplog.messages
    assert text.startswith("0 of 7 processes are ready; decode-0.0 starts; ")
    assert text.endswith("; 3 more start")


def test_a_bar_takes_the_place_of_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    starting = Starting(children("gateway"), has_bar=True)
    try:
        starting.look(0.0)
        starting.look(20.0)
        assert caplog.messages == []
    finally:
        starting.close()
    starting.look(30.0)
    starting.look(40.0)
    assert len(caplog.messages) == 1
