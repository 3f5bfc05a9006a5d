"""`hadal plan`: JSON, a table, files that `hadal serve` reads, and one line for a mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hadal.cli import app
from hadal.core.config import read_deployment
from hadal.lab.sim.plan.traffic import EXAMPLE

SEARCHED = "another search takes 3 s"
SMALL = (
    'requests_per_s = 20\ntokens_in = 1500\ntokens_out = 200\nshape = "flat"\nvariation_in = 0.5\n'
)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", *arguments])


def refused(*arguments: str) -> str:
    """Run a command that must be refused, and return its error of one line."""
    result = run(*arguments)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.fixture
def traffic(tmp_path: Path) -> str:
    path = tmp_path / "traffic.toml"
    path.write_text(SMALL, encoding="utf-8")
    return str(path)


@pytest.mark.slow("a search, and a simulation of what it found")
def test_json_and_files_of_a_plan_that_was_simulated(traffic: str, tmp_path: Path) -> None:
    out = tmp_path / "plans"
    asked = ("--traffic", traffic, "--hardware", "h200", "--slo", "ttft=2s,tpot=40ms")
    result = run(*asked, "--out", str(out), "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["is_verified"]
    assert found["simulated"][0]["problem"] == ""
    assert found["simulated"][0]["tpot_s"]["mean"] <= 0.04
    costs = [plan["cost_usd_day"] for plan in found["plans"]]
    assert costs == sorted(costs)
    assert len(costs) == 3
    assert {"hardware", "decode width", "prefill width", "MTP"} & {
        row["dimension"] for row in found["tried"]
    }
    assert json.loads((out / "plan.json").read_text()) == found
    files = sorted(out.glob("*.toml"))
    assert len(files) == 3
    for path, plan in zip(files, found["plans"], strict=True):
        made = read_deployment(path)
        assert made.prefill.ranks == plan["prefill"]["ranks"]
        assert made.decode.ranks == plan["decode"]["ranks"]
        assert made.fleet.decode_tokens_per_s == round(plan["decode"]["tokens_per_s"])


@pytest.mark.promise(
    "One draft is therefore priced as a what-if. --mtp-tokens asks for drafts, and "
    "the deployment then makes them"
)
@pytest.mark.more(SEARCHED)
def test_the_table_says_why_others_lose(traffic: str) -> None:
    result = run("--traffic", traffic, "--hardware", "h200,h800", "--no-verify")
    assert result.exit_code == 0, result.stderr
    words = " ".join(result.stdout.split())
    dimensions = ("decode width", "prefill width", "MTP")
    others = ("deployments priced", "Not simulated", "does not fit", "the peak's units")
    for said in (*dimensions, *others, "A GPU-hour of"):
        assert said in words


@pytest.mark.promise("H20 and B200 are left out until a price is given")
@pytest.mark.more(SEARCHED)
def test_hardware_without_a_price_is_left_out_until_one_is_given(traffic: str) -> None:
    arguments = ("--traffic", traffic, "--no-verify", "--json", "--slo", "ttft=5s,tpot=60ms")
    found = json.loads(run(*arguments, "--hardware", "h800,b200").stdout)
    assert "b200 is omitted" in found["notes"][0]
    assert all(plan["hardware"] == "h800" for plan in found["plans"])
    priced = json.loads(run(*arguments, "--hardware", "h800,b200", "--price", "b200=0.5").stdout)
    assert not priced["notes"]
    assert priced["plans"][0]["hardware"] == "b200"


@pytest.mark.more(SEARCHED)
def test_the_example_can_be_planned_with(tmp_path: Path) -> None:
    assert run("--example-traffic").stdout == EXAMPLE
    path = tmp_path / "example.toml"
    path.write_text(EXAMPLE, encoding="utf-8")
    found = json.loads(
        run(
            "--traffic", str(path), "--hardware", "h800", "--no-verify", "--json", "--top", "1"
        ).stdout
    )
    assert found["traffic"]["requests_per_s"] == pytest.approx(1851.9)
    assert len(found["plans"]) == 1


@pytest.mark.promise(
    "A traffic may have a million requests/s and a plan 10,000 nodes at the peak; more is"
    " refused, with what to change."
)
@pytest.mark.parametrize(
    ("rate", "why"),
    [
        ("1e9", "requests_per_s is 1e+09; it must be at most 1,000,000"),
        ("1e6", "nodes at the peak, and the limit is"),
    ],
)
def test_traffic_of_a_slip_of_the_pen_is_one_line(rate: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "absurd.toml"
    path.write_text(f"requests_per_s = {rate}\n", encoding="utf-8")
    assert why in refused("--traffic", str(path), "--hardware", "h800")


def test_where_nothing_can_be_written_nothing_is_searched(tmp_path: Path) -> None:
    file, gone = tmp_path / "file", tmp_path / "gone"
    file.touch()
    gone.symlink_to(tmp_path / "nowhere")
    for out, there in ((file, file), (file / "plans", file), (gone, gone)):
        said = refused("--out", str(out), "--hardware", "h900")
        assert f"--out {out} cannot be written: {there} is not a folder" in said, "h900 comes later"
    result = run("--out", str(tmp_path / ("long" * 100)), "--hardware", "h900")
    assert "file name too long" in result.stderr


def test_a_search_that_finds_nothing_makes_no_folder(tmp_path: Path) -> None:
    result = run("--out", str(tmp_path / "plans"), "--hardware", "h900")
    assert "'h900' is unknown" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.promise("Traffic is a table (TOML) or a trace (Mooncake's JSON lines, Azure's CSV).")
@pytest.mark.more(SEARCHED)
def test_traces_are_read(tmp_path: Path) -> None:
    azure = tmp_path / "trace.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(
            f"2023-11-16 18:15:{second:02}.0,{400 + second},{50 + second}\n" for second in range(60)
        )
    )
    mooncake = tmp_path / "trace.jsonl"
    lengths = {"input_length": 1000, "output_length": 100}
    rows = [{"timestamp": 1000 * i, **lengths, "hash_ids": [0, i + 1]} for i in range(50)]
    mooncake.write_text("\n".join(map(json.dumps, rows)))
    for path, cached in ((azure, 0.0), (mooncake, 0.5)):
        result = run("--traffic", str(path), "--hardware", "h200", "--no-verify", "--json")
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["traffic"]["cached_share"] == pytest.approx(
            cached, abs=0.03
        )


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--slo", "ttft=2s"), "tpot has no limit"),
        (("--slo", "e2e=2s,tpot=1s"), "'e2e' is not a quantity of an SLO"),
        (("--hardware", "h900"), "'h900' is unknown"),
        (("--hardware", "b200"), "no reliable price"),
        (("--price", "h20"), "dollars per GPU-hour"),
        (("--price", "h20=-1"), "above 0"),
        (("--traffic", "nowhere.toml"), "no such traffic file"),
        (("--experts", "fp2"), "fp8 or fp4"),
        (("--hardware", "h800", "--experts", "fp4"), "fp4 runs on"),
        (("--hardware", "h800", "--slo", "ttft=2s,tpot=1ms"), "at batch 1"),
        (("--hardware", "h800", "--slo", "ttft=10ms,tpot=50ms"), "TTFT"),
        (("--start", "90000"), "--start is 90000"),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], why: str) -> None:
    assert why in refused(*arguments, "--no-verify")


ONE = b'{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [1]}'


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("a.toml", b"rate = 1", "unknown field 'rate'"),
        ("a.toml", b"= 1", "a.toml:"),
        ("a.toml", b"\xff\xfe\x00", "not UTF-8 text"),
        ("a.txt", b"", "is not a traffic file"),
        ("a.jsonl", b"{}", "line 1: input_length is None"),
        ("a.jsonl", b"nothing", "a.jsonl:"),
        ("a.jsonl", ONE, "are too few to measure a rate"),
        ("a.jsonl.gz", b"\x1f\x8b\x08\x00", "damaged or cut off"),
        ("a.csv", b"a,b\n1,2\n", "not one of Azure's"),
    ],
)
def test_a_file_that_is_none_is_said(name: str, data: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    assert why in refused("--traffic", str(path), "--no-verify")


def test_a_file_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl"
    path.touch()
    assert run("--traffic", str(path), "--no-verify").stderr.count("short.jsonl") == 1


def test_a_seed_below_zero_is_refused_by_its_name() -> None:
    result = run("--seed", "-1")
    assert result.exit_code == 2
    assert "--seed" in result.stderr


@pytest.mark.promise(
    "One draft is therefore priced as a what-if. --mtp-tokens asks for drafts, and "
    "the deployment then makes them"
)
def test_drafts_are_not_asked_of_a_model_that_has_no_module(tmp_path: Path) -> None:
    config = Path(__file__).resolve().parents[3] / "configs" / "deepseek_v3" / "config.json"
    fields = json.loads(config.read_text(encoding="utf-8")) | {"num_nextn_predict_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    said = refused("--model", str(tmp_path), "--mtp-tokens", "1", "--no-verify")
    assert f"--mtp-tokens is 1, but the model in {tmp_path} has no MTP module" in said
