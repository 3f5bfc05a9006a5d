"""Files with any content: reading them ends, with values or with an error of one line. A test's
time limit ends a read that would last for ever.

Mutations are drawn from fixed and from fresh seeds. Before all files had one bounded reader,
5,000-digit integers, 1e400, half surrogates, deep nesting and units = 10^9 ended in tracebacks, or
never.
"""

from __future__ import annotations

import functools
import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from hadal.cli import app
from hadal.core.config import read_deployment
from hadal.core.documents import parse_json, parse_toml, read_bytes, read_text
from hadal.core.errors import CheckpointError, ConfigError
from hadal.core.model_config import read_model_config
from hadal.gateway.desk.service import read_served_model
from hadal.gateway.text import chat
from hadal.gateway.text.template import ConfinedProcess
from hadal.gateway.text.vocabulary import read_vocabulary
from hadal.lab.plan.files import read_traffic
from hadal.lab.sim.day.study import Study
from hadal.lab.sim.plan.traffic import EXAMPLE
from hadal.lab.simulate.files import read_study, study_toml
from hadal.model.checkpoint import Checkpoint
from hadal.runtime.headers import stored_weights
from tests.fresh import fresh
from tests.hostile import HUGE, mutated, mutated_toml
from tests.unit.gateway.model_folder import write_model_folder
from tests.unit.gateway.test_tiktoken import write_folder

ROOT = Path(__file__).resolve().parents[2]
MOONCAKE = [
    {"timestamp": 27_000 * n, "input_length": 600 + n, "output_length": 9, "hash_ids": [0, n + 1]}
    for n in range(8)
]
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:{minute}:46.6805900,{300 + minute},44\n" for minute in range(10, 20)
)


@pytest.fixture(params=[0, 1, 2, "fresh"])
def rng(request: pytest.FixtureRequest) -> Random:
    return fresh() if request.param == "fresh" else Random(request.param)


def check(read: Callable[[], object], data: bytes) -> bool:
    """Return whether `read` succeeds; fail if its error is not a ValueError (or ConfigError) of one
    line. `data`: content that is shown if the check fails.
    """
    said = None
    try:
        read()
    except ValueError as error:
        said = str(error)
    except Exception as error:
        raise AssertionError(
            f"{type(error).__name__}: {str(error)[:300]} for {data[:2_000]!r}"
        ) from error
    assert said is None or (said.isprintable() and 5 < len(said) <= 1_000), (said, data[:2_000])
    return said is None


def leave_with_one_line(arguments: list[str], data: bytes) -> int:
    """Run a command and return its exit code, which must be 0, or 2 with an error of one line."""
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), (
        result.exception,
        data[:2_000],
    )
    assert result.exit_code in (0, 2), (result.output, data[:2_000])
    if result.exit_code:
        assert len(result.stderr.splitlines()) == 1, (result.stderr, data[:2_000])
        assert result.stderr.startswith("hadal"), (result.stderr, data[:2_000])
    return result.exit_code


def test_config_json(rng: Random, tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    fields = json.loads((folder / "config.json").read_text())
    fields["rope_scaling"] = {
        "type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
    }
    fields["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    codes = set()
    for number in range(60):  # The first file is sound, as all mutated files may be refused.
        data = mutated(fields, rng) if number else json.dumps(fields).encode()
        (folder / "config.json").write_bytes(data)
        check(lambda: read_model_config(folder), data)
        codes.add(leave_with_one_line(["serve", "--dry-run", "--model", str(folder)], data))
    assert codes == {0, 2}


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_tokenizers(
    name: str, rng: Random, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An unchanged template keeps its process, as starting one takes longest.
    monkeypatch.setattr(chat, "ConfinedProcess", functools.cache(ConfinedProcess))
    folder = write_model_folder(tmp_path / "model")
    path = folder / name
    fields = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [1]}
    fields = json.loads(path.read_text()) if path.exists() else fields
    for _ in range(40):
        data = mutated(fields, rng)
        path.write_bytes(data)
        check(lambda: read_served_model(folder, "m"), data)


def test_a_vocabulary_of_tiktoken(rng: Random, tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    path, config_path = folder / "tiktoken.model", folder / "tokenizer_config.json"
    sound, config = path.read_bytes(), json.loads(config_path.read_text())
    for number in range(60):
        data = bytearray(sound)
        if number % 2:
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(9)] = rng.choice((b"", b"\xff", b"\n", b"A", b" 9" * 9))
        path.write_bytes(data)
        config_path.write_bytes(json.dumps(config).encode() if number % 2 else mutated(config, rng))
        check(lambda: read_vocabulary(folder), config_path.read_bytes() + data)


def test_indices_and_tensors(rng: Random, tmp_path: Path) -> None:
    shard = "model-00001-of-00001.safetensors"
    names = ["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight", "lm_head.weight"]
    save_file({name: torch.ones(4, 4) for name in names}, tmp_path / shard)
    sound = (tmp_path / shard).read_bytes()
    length = int.from_bytes(sound[:8], "little")
    header = json.loads(sound[8 : 8 + length])
    index = {"metadata": {"total_size": 192}, "weight_map": dict.fromkeys(names, shard)}

    def read_all() -> None:
        stored_weights(tmp_path)
        with Checkpoint(tmp_path, (128, 128)) as checkpoint:
            checkpoint.check_layers(1)
            for name in names:
                checkpoint.matrix(name, (4, 4))

    for number in range(80):
        data = mutated(index, rng) if number % 2 else json.dumps(index).encode()
        (tmp_path / "model.safetensors.index.json").write_bytes(data)
        wrong = sound if number % 2 else mutated(header, rng)
        if not number % 2:
            wrong = len(wrong).to_bytes(8, "little") + wrong + sound[8 + length :]
        (tmp_path / shard).write_bytes(wrong)
        check(read_all, data + wrong)


def test_a_tensors_name_of_five_thousand_digits(tmp_path: Path) -> None:
    name = f"model.layers.{HUGE}.input_layernorm.weight"
    save_file({name: torch.ones(2)}, tmp_path / "model.safetensors")
    with (
        Checkpoint(tmp_path, None) as checkpoint,
        pytest.raises(CheckpointError, match=r"model\.safetensors: holds"),
    ):
        checkpoint.check_layers(1)


def test_deployments(rng: Random, tmp_path: Path) -> None:
    """Read a sound file and sixty damaged ones. Some damaged files are usually still valid; the
    sound file makes exit code 0 certain.
    """
    folder, path = write_model_folder(tmp_path / "model"), tmp_path / "deployment.toml"
    texts = [(ROOT / "configs" / name).read_text() for name in ("laptop.toml", "laptop_ep.toml")]

    def code_of(data: bytes) -> int:
        path.write_bytes(data)
        return leave_with_one_line(
            ["serve", "--dry-run", "--config", str(path), "--model", str(folder)], data
        )

    damaged = [mutated_toml(texts[number % 2], rng) for number in range(60)]
    assert {code_of(data) for data in (texts[0].encode(), *damaged)} == {0, 2}


def test_studies(rng: Random, tmp_path: Path) -> None:
    path, text = tmp_path / "study.toml", study_toml(Study())
    for _ in range(60):
        data = mutated_toml(text, rng)
        path.write_bytes(data)
        check(lambda: read_study(Study().name, path, {}), data)


def test_traffics(rng: Random, tmp_path: Path) -> None:
    for number in range(120):
        kind = ("toml", "jsonl", "csv", "jsonl.gz")[number % 4]
        path = tmp_path / f"traffic.{kind}"
        if kind == "toml":
            data = mutated_toml(EXAMPLE, rng)
        elif kind == "csv":
            data = bytearray(AZURE.encode())
            at = rng.randrange(len(data))
            wrong = [*("", ",", "\n", '"', HUGE, "NaT", "1e400", "-1", "\0"), "x" * 200_000]
            wrong.append("9999-12-31 00:00:00")
            data[at : at + rng.randint(0, 30)] = rng.choice(wrong).encode()
            data = bytes(data)
        else:
            lines = [json.dumps(row).encode() for row in MOONCAKE]
            lines[rng.randrange(8)] = mutated(MOONCAKE[rng.randrange(8)], rng)
            data = b"\n".join(lines)
            data = gzip.compress(data) if kind.endswith("gz") else data
        path.write_bytes(data)
        check(lambda path=path: read_traffic(path), data)


def test_loads_and_placements(rng: Random, tmp_path: Path) -> None:
    loads, current = tmp_path / "loads.json", tmp_path / "current.json"
    value = {"tokens_per_expert": [[90, 20, 10, 40], [1, 2, 3, 4]]}
    loads.write_text(json.dumps(value))
    asked = ["balance", "--loads", str(loads), "--ranks", "2", "--expert-slots", "3"]
    placement = json.loads(CliRunner().invoke(app, [*asked, "--json", "--weighted"]).stdout)
    for number in range(80):
        data = mutated(value, rng) if number % 2 else mutated(placement, rng)
        loads.write_bytes(data if number % 2 else json.dumps(value).encode())
        current.write_bytes(json.dumps(placement).encode() if number % 2 else data)
        leave_with_one_line([*asked, "--current", str(current), "--max-moves", "2"], data)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f'{{"a": [{{"b": {HUGE}}}]}}', r"f: a\[0\]\.b is a number of 5,000 digits"),
        ('{"a": 1e400}', "f: a is inf; a finite number is needed"),
        ('{"a": {"\\ud800": 1}}', r"f: a\.\\ud800 has half of a UTF-16 surrogate pair"),
        (f'{{"a": {"[" * 70}{"]" * 70}}}', r"f: a\[0\]\[0\].* nests deeper than 64 levels"),
        ("[" * 100_000, "f: nests deeper than 64 levels"),
        ('{"a": 9223372036854775808}', "f: a is a number beyond 64 bits"),
        ("[1", "f: cannot be read as JSON"),
    ],
)
def test_the_place_in_a_json_file_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_json(text, "f")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"a = 1\nport = {HUGE}", "f: line 2: port has a number of hundreds of digits"),
        ("[a]\nb = [1.0, inf]", r"f: a\.b\[1\] is inf; a finite number is needed"),
        ("a." * 400_000 + "b = 1", "f: line 1: a key nests deeper than 64 levels"),
        ('"a".' * 200_000 + "b = 1", "f: line 1: a key nests deeper than 64 levels"),
        ("a = " + "[" * 100_000, "f: nests deeper than 64 levels"),
        ("a = 0x" + "f" * 100_000, "f: a is a number beyond 64 bits"),
        ('"\\' * 400_000, "f: not a TOML file"),
    ],
)
def test_the_place_in_a_toml_file_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_toml(text, "f")


def test_text_that_only_looks_long_is_read() -> None:
    text = f'a = "{"b." * 100}{HUGE}" # {"c." * 100}\nd = """\n{"e." * 100}\n"""'
    assert parse_toml(text, "f") == {"a": "b." * 100 + HUGE, "d": "e." * 100 + "\n"}


def test_a_file_is_a_file_and_has_an_end(tmp_path: Path) -> None:
    """Read a pipe, which once blocked, and a gzip file of 600 MiB of zeros, which was once unpacked
    whole.
    """
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(ConfigError, match=r"pipe\.toml: not a file"):
        read_deployment(tmp_path / "pipe.toml")
    (tmp_path / "large").write_bytes(bytes(1001))
    with pytest.raises(ConfigError, match="large: larger than"):
        read_bytes(tmp_path / "large", "small", 1000)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(bytes(20 << 20)) * 30)
    with pytest.raises(ConfigError, match="unpacks to more than 512 MiB"):
        read_text(tmp_path / "bomb.gz", "trace")


@pytest.mark.parametrize(
    "line",
    [
        "lease_s = nan",
        "unit_timeout_s = inf",
        "[prefill]\nunits = 1_000_000_000",
        "[decode]\nranks = 100_000",
    ],
)
def test_no_deployment_has_such_a_number(line: str, tmp_path: Path) -> None:
    path = tmp_path / "deployment.toml"
    path.write_text(line)
    assert leave_with_one_line(["serve", "--dry-run", "--config", str(path)], line.encode()) == 2


def test_the_largest_deployment_is_answered(tmp_path: Path) -> None:
    """Plan the largest allowed deployment, with 4096 units per role: it takes seconds."""
    path = tmp_path / "deployment.toml"
    path.write_text("[prefill]\nunits = 4096\nranks = 8\n[decode]\nunits = 4096\nranks = 16")
    assert leave_with_one_line(["serve", "--dry-run", "--config", str(path)], b"") == 0


def test_a_copied_model_that_is_sound_is_still_read(tmp_path: Path) -> None:
    """Read a valid model: a reader that refuses everything would pass the tests above."""
    shutil.copytree(ROOT / "models" / "hadal-tiny", tmp_path / "model")
    assert read_served_model(tmp_path / "model", "m").context_tokens > 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["chat", "--url", "http://\x01"],
        ["chat", "--url", "http://["],
        ["chat", "--url", "http://127.0.0.1:99999"],
        ["trace", "--url", "file:///etc/passwd"],
        ["replay", "x" * 5_000],
        ["report", "--ledger", "x" * 5_000],
        ["serve", "--dry-run", "--model", "x" * 5_000],
        ["serve", "--dry-run", "--model", "~nobody-here/m"],
        ["serve", "--dry-run", "--config", "/dev/zero"],
        ["plan", "--traffic", "/dev/zero"],
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)
def test_arguments_that_nobody_means(arguments: list[str]) -> None:
    """Try arguments that once ended in a traceback, or never."""
    assert leave_with_one_line(arguments, b"") == 2


@pytest.mark.parametrize("option", ["--ranks", "--expert-slots", "--nodes"])
@pytest.mark.parametrize("number", ["1000000000", "1" + "0" * 30])
def test_numbers_that_nobody_means(option: str, number: str, tmp_path: Path) -> None:
    """Try huge numbers: a plan for a billion ranks once ran without end."""
    path = tmp_path / "loads.json"
    path.write_text('{"tokens_per_expert": [[90, 20, 10, 40]]}')
    result = CliRunner().invoke(
        app,
        ["balance", "--loads", str(path), "--ranks", "2", "--expert-slots", "3", option, number],
    )
    assert result.exit_code == 2
    assert option in result.stderr
    assert "less than or equal to" in result.stderr
