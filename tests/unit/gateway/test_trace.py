"""Tracing of a live server: the route through a real front and host, and the command over a real port."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from typer.testing import CliRunner

from hadal.cli import app
from hadal.core.messages.every import AnyMessage
from hadal.core.messages.questions import HostClock, Trace, TracedStep, TraceRequest
from hadal.core.messages.units import UnitReport
from hadal.core.plans import LinkBytes, TraceEvent
from hadal.gateway.desk.fetch import FetchError
from hadal.gateway.desk.service import ServedModel
from hadal.gateway.desk.trace import TraceReply, describe, fetch, write
from tests.waiting import DEADLINE_S, wait_for

from .fake_units import FakeUnits
from .scenes import TEXT, error_of, scene
from .serving import Serving, serving
from .world import CHAT, World, spell

KEY = "secret-key"


def load(unit: str) -> UnitReport:
    return UnitReport(unit, f"{unit}-epoch", 1000, 0, 0, 64, 0)


def traced(step_id: int, num_ranks: int = 2) -> TracedStep:
    events = []
    for rank in range(num_ranks):
        events.append(TraceEvent(rank, "compute", "attn_in", 0, 0, 5.0, 5.004))
        events.append(TraceEvent(rank, "compute", "attn_in", 1, 0, 5.004, 5.008))
        if num_ranks > 1:
            events.append(TraceEvent(rank, "link", "dispatch", 0, 0, 5.004, 5.012))
            events.append(TraceEvent(rank, "wait", ">dispatch", 0, 0, 5.008, 5.012))
    schedule = "prefill_dual" if num_ranks > 1 else "sequential"
    balance = {"time": 0.9375, "tokens": 1.0} if num_ranks > 1 else {}
    return TracedStep(step_id, schedule, num_ranks, 12, tuple(events), balance)


def answers(
    units: FakeUnits, *steps: TracedStep, clocks: tuple[HostClock, ...] = ()
) -> list[tuple[str, TraceRequest]]:
    """Make decode-0 answer like a leader, with these steps or with as many as are asked for. Return
    the requests that it received.
    """
    asked: list[tuple[str, TraceRequest]] = []
    send = units.send

    def answering(to: str, message: AnyMessage) -> None:
        send(to, message)
        if isinstance(message, TraceRequest):
            asked.append((to, message))
            found = steps or tuple(traced(i) for i in range(message.num_steps))
            # The answer to an older request arrives first, and must not be taken for ours.
            units.tell(Trace("decode-0", message.reply_id - 1, ()))
            units.tell(Trace("decode-0", message.reply_id, found, clocks))

    units.send = answering  # type: ignore[method-assign]
    return asked


async def up(it: World) -> None:
    for unit in ("prefill-0", "decode-0"):
        it.units.tell(load(unit))
    await wait_for(
        lambda: len(it.gateway.link.snapshot().unit_to_report) == 2, "both have reported"
    )


async def test_traces_the_next_steps(model: ServedModel) -> None:
    async with scene(model) as it:
        await up(it)
        asked = answers(it.units)
        reply = await it.client.get("/trace", params={"unit": "decode-0", "steps": "2"})
        assert reply.status_code == 200
        assert [(to, request.num_steps) for to, request in asked] == [("decode-0", 2)]
        body = msgspec.json.decode(reply.content, type=TraceReply)
        assert body == TraceReply("decode-0", (traced(0), traced(1)))
        # The front received the trace too, and goes on.
        assert (await it.chat()).status_code == 200


async def test_balance_that_is_no_number_is_left_out(model: ServedModel) -> None:
    """NaN would become null in JSON, which readers of a trace do not accept as a number."""
    async with scene(model) as it:
        await up(it)
        step = msgspec.structs.replace(
            traced(0),
            balance={"kv": math.nan, "requests": 0.5},
            link_bytes=LinkBytes((1_000_000, 3_000_000)),
        )
        answers(it.units, step)
        reply = await it.client.get("/trace", params={"steps": "1"})
        body = msgspec.json.decode(reply.content, type=TraceReply)
        assert body.steps[0].balance == {"requests": 0.5}
        assert (
            "; dispatch 4.00 MB (75% between nodes); balance requests 0.500"
            in describe(body).splitlines()[0]
        )


async def test_two_at_once_get_their_own(model: ServedModel) -> None:
    async with scene(model) as it:
        await up(it)
        answers(it.units)
        replies = await asyncio.gather(
            *(it.client.get("/trace", params={"steps": str(n)}) for n in (1, 2, 3))
        )
        assert [len(reply.json()["steps"]) for reply in replies] == [1, 2, 3]


async def test_unknown_units_are_named_with_the_known(model: ServedModel) -> None:
    async with scene(model) as it:
        await up(it)
        reply = await it.client.get("/trace", params={"unit": "decode-7"})
        message = error_of(reply, 404, "unit_not_found")["message"]
        assert message == "There is no unit 'decode-7'. Known: decode-0, prefill-0."


async def test_an_idle_unit_is_a_timeout(model: ServedModel) -> None:
    async with scene(model) as it:
        await up(it)
        reply = await it.client.get("/trace", params={"wait_s": "0.05"})
        assert (
            "decode-0 did not run 3 more steps within 0.05 s"
            in error_of(reply, 504, "no_step")["message"]
        )
        # No request waits for a late answer.
        it.units.tell(Trace("decode-0", 1, (traced(0),)))
        assert (await it.chat()).status_code == 200


@pytest.mark.parametrize(
    "query",
    [
        {"steps": "0"},
        {"steps": "101"},
        {"steps": "x"},
        {"steps": "nan"},
        {"steps": "1.5"},
        {"wait_s": "-1"},
        {"wait_s": "1e9"},
    ],
)
async def test_numbers_are_checked(model: ServedModel, query: dict[str, str]) -> None:
    async with scene(model) as it:
        await up(it)
        reply = await it.client.get("/trace", params=query)
        assert error_of(reply, 400)["param"] in query


async def test_the_key_is_asked_for(model: ServedModel) -> None:
    async with scene(model, keys=(KEY,)) as it:
        await up(it)
        answers(it.units)
        assert (await it.client.get("/trace")).status_code == 401
        headers = {"Authorization": f"Bearer {KEY}"}
        assert (await it.client.get("/trace", headers=headers)).status_code == 200


async def test_a_unit_with_too_many_traces_to_make(model: ServedModel) -> None:
    async with scene(model) as it:
        await up(it)
        send = it.units.send

        def refusing(to: str, message: AnyMessage) -> None:
            send(to, message)
            if isinstance(message, TraceRequest):
                it.units.tell(Trace(to, message.reply_id, ()))

        it.units.send = refusing  # type: ignore[method-assign]
        error_of(await it.client.get("/trace"), 429, "too_many_traces")


# ---- the command ----
@pytest.fixture
def served(model: ServedModel) -> Iterator[Serving]:
    with serving(model, spell(model, TEXT), keys=(KEY,)) as it:
        yield it


def run(served: Serving, output: Path, *more: str) -> tuple[int, str]:
    arguments = ["trace", "--url", served.url, "--output", str(output), "--api-key", KEY, *more]
    done = CliRunner().invoke(app, arguments)
    return done.exit_code, done.output


@pytest.fixture
def ready(served: Serving) -> Serving:
    """Return a server with decode-0 known as a unit to trace, as it has sent its first report."""
    headers = {"Authorization": f"Bearer {KEY}"}
    reply = httpx.post(
        f"{served.url}/v1/chat/completions", json=CHAT, headers=headers, timeout=DEADLINE_S
    )
    assert reply.status_code == 200
    return served


@pytest.mark.promise("draw a live unit's steps; place experts for measured loads")
def test_command_writes_a_trace(ready: Serving, tmp_path: Path) -> None:
    answers(ready.world.units)
    output = tmp_path / "trace.json"
    code, text = run(ready, output, "--steps", "2")
    assert code == 0, text
    assert (
        "decode-0 step 1: prefill_dual, 2 micro-batches, 12 tokens, 12.00 ms; 50% of link time"
        " covered" in text
    )
    assert (
        "4.00 ms exposed wait (mean of ranks: 0: 50% 4.00 ms, 1: 50% 4.00 ms); balance tokens"
        " 1.000, time " in text
    )
    assert "link mb0" in text
    trace = json.loads(output.read_text())
    assert {e["pid"] for e in trace["traceEvents"]} == {0, 1}
    assert [e["name"] for e in trace["traceEvents"] if e["ph"] == "C"] == 2 * [
        "balance: tokens",
        "balance: time",
    ]


def test_command_says_why_not(ready: Serving, tmp_path: Path) -> None:
    output = tmp_path / "trace.json"
    refused = "hadal trace: There is no unit 'decode-9'. Known: decode-0.\n"
    assert run(ready, output, "--unit", "decode-9") == (2, refused)
    code, text = run(ready, output, "--wait", "0.05")
    assert code == 2
    assert "an idle unit runs no steps" in text
    answers(ready.world.units)
    code, text = run(ready, tmp_path / "none" / "trace.json")
    assert code == 2
    assert "cannot be written (No such file or directory)" in text
    with pytest.raises(FetchError, match="key"):
        fetch(ready.url, "decode-0", 1, api_key="wrong")
    assert not output.exists()


def test_no_server() -> None:
    with pytest.raises(FetchError, match="cannot be reached"):
        fetch("http://127.0.0.1:1", "decode-0", 1)


def test_a_unit_of_one_rank_has_no_link() -> None:
    text = describe(TraceReply("decode-0", (traced(4, num_ranks=1),)))
    assert (
        "decode-0 step 4: sequential, 1 micro-batch, 12 tokens, 8.00 ms; 1 rank, which sent no"
        " bytes" in text
    )
    assert "link mb0" not in text
    assert "balance" not in text
    assert "compute mb0" in text


def test_one_rank_whose_step_is_one_kernel_shows_the_steps() -> None:
    steps = tuple(
        TracedStep(
            i,
            "sequential",
            1,
            1,
            (
                TraceEvent(0, "compute", "step", 0, 0, 5.0 + i, 5.5 + i),
                TraceEvent(0, "compute", "draw", 0, 0, 5.5 + i, 5.75 + i),
            ),
        )
        for i in range(3)
    )
    text = describe(TraceReply("decode-0", steps), 60)
    assert "rank 0, steps 0 to 2, 2750.00 ms" in text
    picture = next(line for line in text.splitlines() if line.startswith("compute"))
    assert len(picture) <= 60
    assert [picture.count(letter) > 3 for letter in "Sd."] == [True, True, True]
    assert "S all layers as one kernel 500.00 ms, d draw 250.00 ms" in " ".join(text.split())


def test_a_trace_that_is_there_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reply = TraceReply("decode-0", (traced(1),))
    assert [write(reply, None).name for _ in range(3)] == [
        "trace.json",
        "trace-2.json",
        "trace-3.json",
    ]
    asked = tmp_path / "trace-2.json"
    asked.write_text("old")
    assert write(reply, asked) == asked
    assert asked.read_bytes() == (tmp_path / "trace.json").read_bytes(), (
        "a file asked for by name is written over"
    )


def test_a_step_without_events_says_its_balance() -> None:
    text = describe(TraceReply("decode-0", (TracedStep(4, "sequential", 1, 12, (), {"kv": 0.25}),)))
    assert text.endswith("0.00 ms; its ranks sent no events; balance kv 0.250")


async def test_hosts_whose_clocks_were_aligned_are_named(
    model: ServedModel, tmp_path: Path
) -> None:
    clocks = (HostClock("10.0.0.1", (0,), 0.0, 2e-5), HostClock("10.0.0.2", (1,), 86400.5, 7e-5))
    async with scene(model) as it:
        await up(it)
        answers(it.units, traced(0), clocks=clocks)
        answer = await it.client.get("/trace", params={"steps": "1"})
        reply = msgspec.json.decode(answer.content, type=TraceReply)
        assert reply.clocks == clocks
        assert "aligned, with these errors: 10.0.0.1 to 0.02 ms, 10.0.0.2 to 0.07 ms" in describe(
            reply
        )
        file = msgspec.json.decode(write(reply, tmp_path / "trace.json").read_bytes())
        assert file["otherData"]["clocks"][1] == {
            "host": "10.0.0.2",
            "ranks": [1],
            "offset_s": 86400.5,
            "error_s": 7e-5,
        }
        labels = {
            entry["pid"]: entry["args"]["labels"]
            for entry in file["traceEvents"]
            if entry["name"] == "process_labels"
        }
        assert labels[1] == "10.0.0.2, aligned to 0.070 ms"
        assert labels.keys() == {0, 1}
