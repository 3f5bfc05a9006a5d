"""`hadal bench` against a live server: its counts are the server's own, and it ends well however it
ends.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.dist.conftest import Server, StartServer
from tests.dist.serving import SOURCE, metric

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCE)}


def command(server: Server, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "hadal.cli", "bench", server.url, *arguments]


def bench(server: Server, *arguments: str, code: int = 0) -> dict[str, Any]:
    done = subprocess.run(
        command(server, *arguments, "--json"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=ENVIRONMENT,
    )
    assert done.returncode == code, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_what_it_counts_is_what_the_server_counts(server: Server) -> None:
    names = ("hadal_generations_total", "hadal_output_tokens_total", "hadal_prompt_tokens_total")
    before = [metric(server, name) for name in names]
    # hadal-tiny reads most words letter by letter, so a few drawn words differ much in tokens.
    words = ("--seed", "7")
    given = ("--requests", "9", "--duration", "60", "--warm-up", "2", "--output", "5-15", *words)
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
            assert 0 < marks["p50"] <= marks["p95"] <= marks["p99"] <= marks["max"] < 60
        assert level["ttft_s"]["max"] <= level["e2e_s"]["max"]


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
    assert level["elapsed_s"] >= 4 * 0.2 / 0.5
    assert level["tokens_out_mean"] == pytest.approx(2.6), "2, 2, 2, 3, 4: halves rounded"
    assert level["cache_hit_share"] > 0.3, "its prompts begin alike"
    assert json.loads((out / "bench.json").read_text())["levels"] == [level]
    assert "under load" in (out / "bench.html").read_text()


def test_refusals_and_late_answers_are_told_apart(start_server: StartServer) -> None:
    server = start_server(limits={"max_queued": 1}, decode={"max_requests": 1})
    given = ("--concurrency", "8", "--requests", "16", "--warm-up", "0", "--input", "50")
    [level] = bench(server, *given, "--output", "20")["levels"]
    assert level["num_done"] >= 1
    assert level["errors"] == {"429 overloaded": 16 - level["num_done"]}
    late = ("--concurrency", "1", "--requests", "2", "--warm-up", "0", "--output", "900")
    [level] = bench(server, *late, "--timeout", "0.5", code=1)["levels"]
    assert level["errors"] == {"no end within 0.5 s": 2}


def test_a_wrong_key_is_told_before_any_load(start_server: StartServer) -> None:
    server = start_server("--api-key", "k")
    done = subprocess.run(
        command(server, "--api-key", "other"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=ENVIRONMENT,
    )
    assert done.returncode == 2
    assert "answered 401" in done.stderr
    assert bench(server, "--api-key", "k", "--requests", "2", "--concurrency", "1")["levels"]


def test_ctrl_c_shows_what_was_measured_so_far(server: Server, tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(server, "--concurrency", "2", "--duration", "600", "--out", str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, "COLUMNS": "80"},
    )
    before = metric(server, "hadal_generations_total", 'end="finished"')
    deadline_s = time.monotonic() + 60
    while metric(server, "hadal_generations_total", 'end="finished"') < before + 12:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=20)
    assert process.returncode == 130, errors
    assert "2 at once" in out
    assert "TTFT" in out
    assert "Stopped by Ctrl-C" in out
    assert "Traceback" not in errors
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["is_stopped"]
    assert found["levels"][0]["num_done"] >= 4
    assert found["levels"][0]["errors"] == {}
