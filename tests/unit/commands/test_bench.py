"""`hadal bench` without a server: its requests, its figures from samples, and the page."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from typer.testing import CliRunner

from hadal.apps.bench.calibration import Calibration
from hadal.apps.bench.lengths import BenchAsk, parse_lengths, read_trace
from hadal.apps.bench.load import STOPPED, Level, LevelRun, LoadPlan, run_level
from hadal.apps.bench.page import bench_html
from hadal.apps.bench.request import Sample, Target, _follow
from hadal.apps.bench.texts import Texts
from hadal.apps.bench.values import level_summary, parse_promises, summary
from hadal.cli import app
from hadal.core.errors import ConfigError
from tests.unit.commands.pages import PLOTLY, Page


@pytest.mark.parametrize(
    ("text", "mean", "spread"),
    [
        ("200", 200.0, 0.0),
        ("100-300", 200.0, 58.0),
        ("normal:200:20", 200.0, 20.0),
        ("lognormal:200:0.5", 200.0, 100.0),
        ("exponential:200", 200.0, 200.0),
    ],
)
def test_lengths_have_the_mean_and_the_spread_that_was_asked_for(
    text: str, mean: float, spread: float
) -> None:
    drawn = parse_lengths(text, "--input").draw(np.random.default_rng(0), 50_000)
    assert np.mean(drawn) == pytest.approx(mean, rel=0.02)
    assert np.std(drawn) == pytest.approx(spread, rel=0.03, abs=0.01)
    assert min(drawn) >= 1


@pytest.mark.parametrize("text", ["", "0", "-5", "9-3", "normal:9", "lognormal:0:1", "2e9", "many"])
def test_lengths_that_are_none_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match="--output is"):
        parse_lengths(text, "--output")


def test_promises() -> None:
    assert parse_promises("TTFT=2s, tpot=50ms") == {"ttft": 2.0, "tpot": 0.05}
    assert parse_promises("") == {}
    for bad in ("ttft", "ttft=2", "wait=2s", "ttft=0s", "ttft=1s,ttft=2s"):
        with pytest.raises(ConfigError, match="--slo"):
            parse_promises(bad)


@pytest.mark.promise(
    "--rate 1,2,4 sets open loads, in requests/s: requests are sent at exponential "
    "gaps, whether or not earlier ones have finished."
)
def test_a_rate_is_kept_and_its_gaps_are_chance() -> None:
    times = list(Level("rate", 5.0).arrivals(np.random.default_rng(1), None, 2000.0, 10**9))
    gaps = np.diff(times)
    assert len(times) == pytest.approx(10_000, rel=0.03)
    assert np.std(gaps) == pytest.approx(np.mean(gaps), rel=0.05), "exponential, not even"
    assert len(list(Level("rate", 5.0).arrivals(np.random.default_rng(1), None, 1e9, 7))) == 7


def test_time_in_which_nothing_came_was_offered_too() -> None:
    """Run a level without arrivals: its time counts; otherwise a low rate would seem higher than it was."""
    target = Target("http://127.0.0.1:9/v1", "none")
    run, found = LevelRun(Level("rate", 1e-3)), Calibration(target, Texts(0), ())
    plan = LoadPlan(0.05, 9, parse_lengths("9", "x"), parse_lengths("9", "x"))
    asyncio.run(run_level(httpx.AsyncClient(), found, plan, 0, run))
    assert (run.samples, run.elapsed_s) == ([], 0.05)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_stream_is_read_however_it_is_cut(size: int) -> None:
    """Cut the stream anywhere. U+2028 and U+0085, at which `str.splitlines` splits, end no line in
    it.
    """
    chunk = {"choices": [{"delta": {"content": "one\u2028two\u0085three"}}]}
    text = json.dumps(chunk, ensure_ascii=False)
    data = f"data: {text}\r\n\r\n: wait\n\ndata: [DONE]\n\n".encode()

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(data), size):
            yield data[at : at + size]

    headers = {"content-type": "text/event-stream"}
    found = Sample(0.0)
    asyncio.run(_follow(httpx.Response(200, headers=headers, content=pieces()), found, lambda: 1.0))
    assert (found.error, found.num_pieces) == ("", 1)


def test_prompts_share_what_is_asked_for_and_nothing_else() -> None:
    texts = Texts(seed=3, tokens_per_word=1.0, num_shared=40)
    first, second = (texts.prompt(BenchAsk(100, 1), number).split() for number in (1, 2))
    assert len(first) == len(second) == 100
    assert first[:40] == second[:40]
    assert first[40:] != second[40:]
    assert sum(a == b for a, b in zip(first[40:], second[40:], strict=True)) < 10


def test_a_trace_keeps_its_times_its_lengths_and_what_its_prompts_share(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 2000, "input_length": 1024, "output_length": 8, "hash_ids": [7, 9]},
        {"timestamp": 1000, "input_length": 1030, "output_length": 4, "hash_ids": [7, 9, 3]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    trace = read_trace(path, scale=0.5)
    assert trace.at_s == (0.0, 1.0)
    assert [(ask.tokens_in, ask.tokens_out) for ask in trace.asks] == [(515, 2), (512, 4)]
    texts = Texts(seed=0, tokens_per_word=1.0, part_tokens=256)
    longer, shorter = (texts.prompt(ask, number) for number, ask in enumerate(trace.asks))
    assert longer.startswith(shorter)
    assert list(Level("trace", 2.0).arrivals(np.random.default_rng(0), trace, 9.0, 9)) == [0.0, 0.5]
    path.write_text("[1, 2]")
    with pytest.raises(ConfigError, match=r"trace\.jsonl: line 1"):
        read_trace(path)


def sample(due_s: float, first_s: float, last_s: float, tokens: int, **more: object) -> Sample:
    made = Sample(due_s, due_s, first_s, last_s, last_s, [last_s - first_s], 2, 10, tokens, 4)
    for name, value in more.items():
        setattr(made, name, value)
    return made


RUN = LevelRun(
    Level("rate", 2.0),
    [
        sample(0.0, 0.1, 1.1, 11),
        sample(0.5, 0.8, 4.8, 11),
        Sample(1.0, 1.0, end_s=1.1, error="429 too_many_requests"),
        sample(2.0, 2.1, 2.2, 5, error=STOPPED),
    ],
    elapsed_s=5.0,
)


@pytest.mark.promise("Their times count from when they were due, so a late client hides nothing.")
def test_a_level_counts_what_was_answered_and_what_was_answered_in_time() -> None:
    found = level_summary(RUN, parse_promises("ttft=200ms,tpot=200ms"))
    assert (found["num_sent"], found["num_done"], found["num_stopped"]) == (3, 2, 1)
    assert found["errors"] == {"429 too_many_requests": 1}
    assert found["requests_per_s"] == pytest.approx(0.4)
    assert found["tokens_out_per_s"] == pytest.approx(4.4)
    assert found["cache_hit_share"] == pytest.approx(0.4)
    assert found["ttft_s"]["mean"] == pytest.approx(0.2), "from when they were due"
    assert found["tpot_s"]["max"] == pytest.approx(0.4)
    assert found["e2e_s"]["max"] == pytest.approx(4.3)
    assert (found["num_good"], found["goodput_per_s"]) == (1, pytest.approx(0.2))
    assert found["good_share"] == pytest.approx(1 / 3), "of all that were sent"
    unpromised = level_summary(RUN, {})
    assert unpromised["num_good"] is unpromised["goodput_per_s"] is None


def test_a_server_that_counts_no_tokens_leaves_dashes() -> None:
    run = LevelRun(Level("rate", 1.0), [sample(0.0, 0.1, 0.3, 0, tokens_out=None, tokens_in=None)])
    run.elapsed_s = 1.0
    found = level_summary(run, {})
    assert found["tokens_out_per_s"] is found["cache_hit_share"] is None
    assert found["tpot_s"]["mean"] == pytest.approx(0.2), "pieces are counted then"


def test_the_page_has_every_figure_and_needs_nothing_from_outside() -> None:
    what = {"url": "http://x/v1", "duration_s": 5.0, "seed": 1}
    found = summary(what, "<b>m", [RUN], parse_promises("ttft=1s"), ["so <i>"], is_stopped=True)
    found = json.loads(json.dumps(found))
    text, rest = bench_html(found).split(PLOTLY)
    page = Page(text + rest)
    assert set(page.figures) == {"ttft", "tpot", "served", "ttft-curve", "tpot-curve"}
    assert "http://" not in page.style
    assert not any("src" in attributes for _, attributes in page.tags)
    assert page.row("2/s")[1:4] == ["3", "1", "0.40"]
    assert "429 too_many_requests" in page.text
    assert "<b>m under load" in page.text, "names are text"
    assert Page("".join(bench_html({}).split(PLOTLY))).figures == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ftp://x"], "URL is 'ftp://x'"),
        (["--rate", "1,fast"], '--rate: "fast" is not a number'),
        (["--concurrency", "1.5"], "--concurrency is 1.5; use whole numbers"),
        (["--input", "long"], "--input is 'long'"),
        (["--slo", "ttft"], "--slo: 'ttft' is not a limit"),
        (["--endpoint", "embeddings"], "--endpoint is 'embeddings'"),
        (["--trace", "/no/such.jsonl"], "/no/such.jsonl"),
        (["--trace", "a.txt"], "use Mooncake's"),
        (["--out", __file__], "is not a folder"),
        (["http://127.0.0.1:1"], "cannot be reached"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
