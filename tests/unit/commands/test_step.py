"""`hadal step`: the JSON's keys, a table for people, a trace for Perfetto, one line for a mistake."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hadal.cli import app


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["step", *arguments])


def test_json_of_a_decode_step() -> None:
    sizes = ("--ep", "144", "--batch", "88", "--kv", "4989")
    result = run("--phase", "decode", *sizes, "--hardware", "h800", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["tokens_per_s_gpu"] == pytest.approx(88e3 / found["step_ms"])
    assert found["tokens_per_s_user"] == pytest.approx(1e3 / found["step_ms"])
    assert sum(stage["share"] for stage in found["stages"]) == pytest.approx(1.0)
    assert {"op", "name", "bound", "step_ms", "exposed_ms"} <= found["stages"][0].keys()
    assert found["extrapolated"] == []


def test_json_of_a_prefill_step_has_the_same_keys() -> None:
    decode = json.loads(run("--json").stdout)
    arguments = ("--phase", "prefill", "--ep", "32", "--tokens", "16384", "--prompt", "4096")
    prefill = json.loads(run(*arguments, "--json").stdout)
    assert prefill.keys() == decode.keys()
    assert prefill["tokens_per_s_user"] is None


def test_balanced_routing_stands_beside_what_is_expected() -> None:
    expected = json.loads(run("--phase", "prefill", "--json").stdout)
    even = json.loads(run("--phase", "prefill", "--expert-imbalance", "1", "--json").stdout)
    assert expected["expert_imbalance"] > even["expert_imbalance"] == 1.0
    assert expected["balanced_step_ms"] == even["balanced_step_ms"] == even["step_ms"]
    assert even["step_ms"] < expected["step_ms"]
    assert "With balanced routing" in run("--phase", "prefill").stdout
    shown = run("--phase", "prefill", "--expert-imbalance", "1").stdout
    assert "With balanced routing" not in shown


def test_drafts_and_plans() -> None:
    plain = json.loads(run("--json", "--plan", "sequential").stdout)
    drafts = json.loads(
        run("--json", "--plan", "sequential", "--mtp-tokens", "1", "--mtp-accept", "0.8").stdout
    )
    assert plain["plan"] == drafts["plan"] == "sequential"
    assert drafts["step_ms"] > plain["step_ms"]
    assert drafts["tokens_per_s_user"] == pytest.approx(1.8e3 / drafts["step_ms"])


def test_the_table_explains_the_step() -> None:
    result = run("--ep", "128", "--batch", "128", "--kv", "4096", "--hardware", "h100")
    assert result.exit_code == 0
    stages = ("core attention", "dispatch", "output head", "link mb0")
    for words in (*stages, "ms per step", "extrapolated", "of HBM"):
        assert words in result.stdout
    assert "…" not in result.stdout, "fits 80 columns"
    assert "it does not fit" in run("--batch", "400").stdout


def test_the_trace_is_chromes(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    result = run("--trace", str(path))
    assert result.exit_code == 0
    assert str(path) in result.stdout.replace("\n", "")
    events = json.loads(path.read_text())["traceEvents"]
    assert {"dispatch", "combine", "attn_core"} <= {event["name"] for event in events}
    # With a trace written to a file, stdout still has only JSON.
    assert json.loads(run("--json", "--trace", str(path)).stdout)["step_ms"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--phase", "warmup"], "decode or prefill"),
        (["--hardware", "h900"], "use one of h800"),
        (["--batch", "0"], "requests of a rank: 0"),
        (["--ep", "100", "--redundant", "32"], "do not divide evenly among 100"),
        (["--ep", "0"], "0 ranks"),
        (["--plan", "quick"], "use one of auto"),
        (["--mtp-accept", "0.8"], "give --mtp-tokens as well"),
        (["--tokens", "16384"], "--tokens does not apply to --phase decode"),
        (["--phase", "prefill", "--batch", "8"], "--batch does not apply to --phase prefill"),
        (
            ["--phase", "prefill", "--prompt", "100", "--cached", "100"],
            "at least one must be computed",
        ),
        (["--experts-dtype", "int4"], "experts in 'int4'"),
        (["--trace", "/no/such/folder/step.json"], "cannot be written"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("hadal step: ")
