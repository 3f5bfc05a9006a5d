"""`hadal bench` against a live server: its counts equal the server's, and it ends cleanly in every case."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hadal.cli import app
from tests.dist import gate
from tests.dist.conftest import Server, StartServer
from tests.dist.serving import SOURCE, metric
from tests.waiting import DEADLINE_S, wait_until

MORE = "test_what_it_counts is in `make test`"


def bench(server: Server, *arguments: str, code: int = 0) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["bench", server.url, *arguments, "--json"])
    assert done.exit_code == code, done.output
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def num_refused(server: Server) -> float:
    """Return the number of refused requests; 0 while the metric is missing, before the first one."""
    with suppress(AssertionError):
        return metric(server, "hadal_refusals_total")
    return 0.0


def test_what_it_counts_is_what_the_server_counts(server: Server) -> None:
    names = ("hadal_generations_total", "hadal_output_tokens_total", "hadal_prompt_tokens_total")
    before = [metric(server, name) for name in names]
    # hadal-tiny reads most words letter by letter, so a few random words differ widely in tokens.
    words = ("--seed", "7")
    given = ("--requests", "9", "--duration", "600", "--warm-up", "2", "--output", "5-15", *words)
    found = bench(server, "--rate", "20", "--concurrency", "3", *given, "--shared", "128")
    requests, tokens_out, tokens_in = (
        metric(server, name) - was for name, was in zip(names, before, strict=True)
    )
    levels = found["levels"]
    assert [level["name"] for level in levels] == ["20/s", "3 at once"]
    assert all(level["num_done"] == level["num_sent"] == 9 for level in levels)
    assert requests == 2 * 9 + 2 + 2, "two levels, the warm-up and two of the calibration"
    seen_out = sum(level["tokens_out_mean"] * 9 for level in levels)
    assert 5 * 18 <= seen_out <= 15 * 18
    assert 2 + 2 * 5 <= tokens_out - seen_out <= 2 + 2 * 15
    assert sum(level["tokens_in_mean"] * 9 for level in levels) < tokens_in
    for level in levels:
        assert level["tokens_in_mean"] == pytest.approx(200, rel=0.08), "as asked for"
        assert 0.5 < level["cache_hit_share"] < 0.8, "128 of 200 are shared"
        for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
            marks = level[name]
            assert 0 < marks["p50"] <= marks["p95"] <= marks["p99"] <= marks["max"]
        assert level["ttft_s"]["max"] <= level["e2e_s"]["max"]


@pytest.mark.more(MORE)
def test_a_trace_is_sent_as_it_is(server: Server, tmp_path: Path) -> None:
    rows = [
        {
            "timestamp": 200 * n,
            "input_length": 600 + n,
            "output_length": 3 + n,
            "hash_ids": [1, 9 + n],
        }
        for n in range(5)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "out"
    given = ("--trace", str(path), "--scale", "0.5", "--speed", "0.5", "--out", str(out))
    [level] = bench(server, *given, "--endpoint", "completions")["levels"]
    assert level["num_done"] == 5
    assert level["tokens_out_mean"] == pytest.approx(2.6), "2, 2, 2, 3, 4: halves rounded"
    assert level["cache_hit_share"] > 0.3, "its prompts begin alike"
    assert json.loads((out / "bench.json").read_text())["levels"] == [level]
    assert "under load" in (out / "bench.html").read_text()


@pytest.fixture
def narrow(borrow: StartServer) -> Server:
    """A server with a key and capacity for two requests."""
    return borrow("--api-key", "k", limits={"max_queued": 1}, decode={"max_requests": 1})


@pytest.mark.more(MORE)
@pytest.mark.slow("answers are late after 10 s")
def test_refusals_and_late_answers_are_told_apart(narrow: Server) -> None:
    """The gate first holds decode until all excess requests are refused. It then holds decode again,
    until the client's time-out.
    """
    server = narrow
    server.gate.hold(gate.DECODE)
    before = num_refused(server)
    key = ("--api-key", "k", "--warm-up", "0")
    given = (*key, "--concurrency", "8", "--requests", "16", "--input", "50")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(bench, server, *given, "--output", "20")
        wait_until(
            lambda: (
                num_refused(server) - before + metric(server, "hadal_generations_now") == 16
                or asked.done()
            ),
            "all are sent",
        )
        server.gate.open()
        [level] = asked.result()["levels"]
    assert level["num_done"] >= 1
    assert level["errors"] == {"429 overloaded": 16 - level["num_done"]}
    server.gate.hold(gate.DECODE)
    late = (*key, "--concurrency", "2", "--requests", "2", "--output", "900")
    [level] = bench(server, *late, "--timeout", "10", code=1)["levels"]
    assert level["errors"] == {"the reply was not complete within 10 s": 2}


@pytest.mark.more(MORE)
def test_a_wrong_key_is_told_before_any_load(narrow: Server) -> None:
    done = CliRunner().invoke(app, ["bench", narrow.url, "--api-key", "other"])
    assert done.exit_code == 2
    assert "answered 401" in done.stderr


@pytest.mark.more(MORE)
def test_ctrl_c_shows_what_was_measured_so_far(server: Server, tmp_path: Path) -> None:
    given = ("--concurrency", "2", "--duration", "600", "--warm-up", "0", "--out", str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-m", "hadal.cli", "bench", server.url, *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "200"},
        # A shell that runs the tests in the background ignores SIGINT, and the child would inherit
        # that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    finished = "hadal_generations_total", 'end="finished"'
    before = metric(server, *finished)
    # Two requests precede the load, and two may have ended before their answers were read.
    wait_until(lambda: metric(server, *finished) >= before + 8, "some are answered")
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, errors
    assert "2 at once" in out
    assert "TTFT" in out
    assert "Stopped by Ctrl-C" in out
    assert "Traceback" not in errors
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["is_stopped"]
    assert found["levels"][0]["num_done"] >= 4
    assert found["levels"][0]["errors"] == {}
