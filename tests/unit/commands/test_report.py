"""`hadal report`: its input, its output, and its message if there is nothing to print."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from hadal.cli import app
from hadal.commands import report
from hadal.commands.report import run, seconds_of
from hadal.core.facts import NodesFact, PackedFacts, RequestFact
from hadal.runtime.ledger.address import LEDGER_VARIABLE, ledger_url
from hadal.runtime.ledger.store import Store
from hadal.stats.prices import R1

NOW_S = 1_764_400_000.0
"""Current time, as the report sees it."""


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["report", *arguments], env={"COLUMNS": "100"})


def write(path: str, facts: PackedFacts) -> None:
    store = Store(ledger_url(path))
    store.prepare()
    store.write(facts)
    store.close()


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a ledger: a request per minute for two days until now, of two tenants and two models,
    on one unit of each role.
    """
    clock = SimpleNamespace(time=lambda: NOW_S, localtime=time.localtime)
    monkeypatch.setattr(report, "time", clock)
    path = str(tmp_path / "l.sqlite")
    requests = []
    for index in range(2 * 24 * 60):
        at_s = NOW_S - 60 * index - 30
        names = f"r{index}", f"t{index % 2}", f"m{index % 2}"
        tokens, times = (64, 36, 11, 11 * 105), (at_s - 3, at_s, at_s - 2, at_s - 1)
        income = R1.flat().charge(0, 64, 36, 11)
        requests.append(
            RequestFact(*names, *tokens, "stop", *times, "prefill-0", "decode-0", 0, income)
        )
    nodes = [
        NodesFact(f"{role}-0", "e", role, 8, 8, NOW_S - 2 * 86_400, NOW_S, "cpu", 2_000_000, "m0")
        for role in ("prefill", "decode")
    ]
    write(path, PackedFacts(tuple(requests), tuple(nodes)))
    return path


def test_the_last_day_as_json(ledger: str) -> None:
    result = call("--json", "--ledger", ledger)
    assert result.exit_code == 0, result.output
    fields = json.loads(result.stdout)
    number = fields["requests"]
    assert number == 1440
    assert fields["tokens_in"] == 100 * number
    assert fields["tokens_hit"] == 64 * number
    assert fields["tokens_out"] == 11 * number
    assert fields["tokens_per_s_user"] == pytest.approx(10.0)
    assert fields["kv_length_mean"] == 105.0
    assert fields["nodes_mean"] == pytest.approx(2.0, rel=0.01)
    assert fields["nodes_peak"] == 2.0
    assert fields["cost_usd"] == pytest.approx(2 * 8 * 24 * 2, rel=0.01)
    assert fields["income_micro_usd"] == round(number * (64 * 0.14 + 36 * 0.55 + 11 * 2.19))
    assert len(fields["hours"]) in (24, 25)
    assert sum(hour["tokens_out"] for hour in fields["hours"]) == fields["tokens_out"]


def test_a_shorter_time_and_other_lines(ledger: str) -> None:
    fields = json.loads(
        call("--json", "--ledger", ledger, "--last", "90m", "--by", "tenant").stdout
    )
    assert fields["requests"] == 90
    assert [line["tenant"] for line in fields["tenants"]] == ["t0", "t1"]
    fields = json.loads(call("--json", "--ledger", ledger, "--by", "model").stdout)
    assert [(line["model"], line["nodes_peak"]) for line in fields["models"]] == [
        ("m0", 2.0),
        ("m1", 0.0),
    ]


def test_times_and_errors(ledger: str) -> None:
    """Report requests with 1 s to the first token and 100 ms per further token. Three more requests
    failed or were refused.
    """
    failed = (
        RequestFact(f"e{index}", "t1", "m1", 0, 0, 0, 0, end, NOW_S - 90, NOW_S - 60)
        for index, end in enumerate(("429", "429", "504"))
    )
    write(ledger, PackedFacts(tuple(failed)))
    fields = json.loads(call("--json", "--ledger", ledger, "--by", "tenant").stdout)
    for line in (fields, *fields["tenants"]):
        for percent in (50, 99):
            assert line[f"ttft_ms_p{percent}"] == pytest.approx(1000.0)
            assert line[f"tpot_ms_p{percent}"] == pytest.approx(100.0)
    assert fields["errors"] == fields["tenants"][1]["errors"] == {"429": 2, "504": 1}
    assert fields["tenants"][0]["errors"] == {}
    text = call("--ledger", ledger, "--by", "tenant").stdout
    assert re.search(r"errors +3 +2 x 429 Too Many Requests, 1 x 504 Gateway Timeout", text)
    assert re.search(r"time to first token, p50 +1 s +p99 1 s; waiting included", text)
    assert re.search(
        r"t1 +1 s +1 s +100 ms +100 ms +2 x 429 Too Many Requests, 1 x 504 Gateway Timeout", text
    )


def test_a_dash_has_a_reason(ledger: str, tmp_path: Path) -> None:
    text = call("--ledger", ledger, "--by", "tenant").stdout
    assert "- " not in text[text.index("tenant ") :].replace("─", "")
    assert "Nodes and cost are in the total only" in text
    assert (
        "- under nodes: the row had no nodes of its own"
        in call("--ledger", ledger, "--by", "model").stdout
    )
    path = str(tmp_path / "refused.sqlite")
    fact = RequestFact("e", "t", "m", 0, 0, 0, 0, "503", NOW_S - 9, NOW_S - 8)
    write(path, PackedFacts((fact,)))
    text = call("--ledger", path, "--by", "tenant").stdout
    assert "- in other columns: no prompt was answered" in text


def test_other_prices_than_were_charged(ledger: str) -> None:
    fields = json.loads(call("--json", "--ledger", ledger, "--prices", "0/0/1").stdout)
    assert fields["income_micro_usd"] == fields["tokens_out"]


@pytest.mark.parametrize("by", ["hour", "model", "tenant"])
def test_the_table(ledger: str, by: str) -> None:
    result = call("--ledger", ledger, "--by", by, "--utc")
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert re.search(r"nodes, mean +(2\.000|1\.99\d)", text)
    assert re.search(r"from the cache +9\d,\d{3} +64\.0 %", text)
    assert re.search(r"tokens/s per user +10\.0", text)
    assert "UTC" in text
    assert ledger in text.replace("\n", "")
    assert {
        "hour": time.strftime("%m-%d %H:00", time.gmtime(NOW_S - 30)),
        "model": "m1",
        "tenant": "t1",
    }[by] in text


def test_no_ledger_says_how_to_get_one_and_makes_none(tmp_path: Path) -> None:
    result = call("--ledger", str(tmp_path / "none.sqlite"))
    assert result.exit_code == 2
    assert "there is no ledger at" in result.stderr
    assert "`hadal serve` creates one" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_empty_ledger_says_what_to_do(tmp_path: Path) -> None:
    path = str(tmp_path / "l.sqlite")
    write(path, PackedFacts(()))
    result = call("--ledger", path)
    assert result.exit_code == 0
    assert "No request has ended yet" in result.stdout
    assert json.loads(call("--ledger", path, "--json").stdout)["requests"] == 0


def test_a_quiet_time_says_when_the_last_request_was(
    ledger: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"last": "1h", "by": "hour", "as_json": False, "prices": "", "is_utc": True}
    run(**asked, ledger=ledger, now_s=NOW_S + 10 * 86_400)
    text = capsys.readouterr().out
    assert "No request ended in this period; the last one ended at" in text
    assert time.strftime("%Y-%m-%dT%H:%M", time.gmtime(NOW_S - 30)) in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--last", "soon"), "write it like 90m, 24h, 7d or 2w"),
        (("--last", "0h"), "write it like 90m"),
        (("--tenant", "--by", "model"), "leave one of them out"),
        (("--last", "999999w"), "at most 3660d"),
        (("--by", "day"), "by hour, model, tenant"),
        (("--prices", "cheap"), "HIT/MISS/OUT"),
        (("--ledger", "mysql://h/d"), "SQLite or PostgreSQL"),
        (("--ledger", "off"), "the ledger is off"),
    ],
)
def test_what_cannot_be_is_told(ledger: str, arguments: tuple[str, ...], words: str) -> None:
    result = call("--ledger", ledger, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_the_environment_says_which_ledger(ledger: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEDGER_VARIABLE, ledger)
    assert json.loads(call("--json").stdout)["requests"] > 1000
    monkeypatch.setenv(LEDGER_VARIABLE, "off")
    assert "unset HADAL_LEDGER" in call("--json").stderr


def test_times() -> None:
    found = [seconds_of(text) for text in ("90m", "24h", "24", "7d", " 2 W ")]
    assert found == [5400, 86_400, 86_400, 604_800, 1_209_600]
