"""A deployment is checked when it is made; an error names the field and says what to do."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hadal.core.config import Deployment, UnitsConfig, read_deployment
from hadal.core.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"dispatch_format": "fp16"},
            "dispatch_format is 'fp16'; known are 'fp32', 'fp8', 'fp8_pow2'",
        ),
        ({"transport": "udp"}, "transport is 'udp'"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"device": "cpu", "transport": "nccl"}, "needs GPUs, and device is 'cpu'"),
        ({"device_memory_gb": -1.0}, "device_memory_gb is -1.0; expected `float` >= 0.0"),
        ({"rank_timeout_s": 0.5}, "rank_timeout_s is 0.5; ranks report every 0.25 s"),
        ({"collective_timeout_s": 1.0}, "collective_timeout_s .* must exceed rank_timeout_s"),
        (
            {"unit_timeout_s": 5.0, "rank_timeout_s": 6.0},
            "unit_timeout_s must exceed rank_timeout_s",
        ),
        ({"collective_timeout_s": 0.0}, "collective_timeout_s is 0.0; expected `float` > 0.0"),
    ],
)
def test_a_field_that_cannot_work_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Deployment(**fields)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ranks": 0}, "ranks is 0; expected `int` >= 1"),
        ({"ranks_per_node": 0}, "ranks_per_node is 0"),
        ({"ranks": 12}, "ranks is 12, which does not fill nodes of 8"),
        ({"ranks": 4, "redundant_experts": -1}, "redundant_experts is -1; expected `int` >= 0"),
        (
            {"redundant_experts": 8},
            "redundant_experts is 8 with one rank: a replica needs a second rank",
        ),
        ({"overlap": "dual"}, "overlap is 'dual'; known are 'auto'"),
        ({"mode": "fast"}, "mode is 'fast'"),
        ({"min_split_tokens": -1}, "min_split_tokens is -1; expected `int` >= 0"),
    ],
)
def test_a_field_of_the_units_is_named_with_their_kind(
    kind: str, fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        UnitsConfig(**fields)
    file = tmp_path / "d.toml"
    lines = [f"{name} = {json.dumps(value)}" for name, value in fields.items()]
    file.write_text("\n".join([f"[{kind}]", *lines]))
    with pytest.raises(ConfigError, match=rf"d\.toml: {kind}\.{words}"):
        read_deployment(file)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("[ledger]\ngpu_hour_usd = -1.0", "ledger.gpu_hour_usd is -1.0; expected `float` >= 0.0"),
        ("[fleet]\nperiod_s = 1e5", "fleet.period_s is 100000.0; expected `float` <= 86400.0"),
        ("[fleet]\nbundle_decode = 1", "fleet.bundle_prefill is 0 and bundle_decode 1: a bundle"),
        (
            "[fleet]\nprefill_max = 1\n[prefill]\nunits = 2",
            "fleet.prefill_max (1) is less than prefill",
        ),
        ("[gateway]\nprocesses = 0", "gateway.processes is 0; expected `int` >= 1"),
        ("[gateway]\nallowed_hosts = ['a', 3]", "gateway.allowed_hosts[1] is 3; expected `str`"),
        ("[cache]\ndisk_mb = 0", "cache.disk_mb is 0; expected `int` >= 1"),
        ("[decode]\ndrafts = 'yes'", "decode.drafts is 'yes'; known are 'auto' and 0 to 3"),
        ("[decode]\ndrafts = 4", "decode.drafts is 4; known are 'auto' and 0 to 3"),
        ("[decode]\ndrafts = 1.5", "decode.drafts is 1.5; known are 'auto' and 0 to 3"),
        ("[cache]\nmemory = 'on'", "cache.memory is 'on'; known are 'auto', 'off'"),
        ("[limits]\nmax_n = true", "limits.max_n is True; expected `int`, got `bool`"),
        (
            "[limits]\nmax_m = 1",
            "limits: object contains unknown field `max_m`. Known: max_body_bytes, ",
        ),
        ("limits = 1", "limits is 1; expected `object`, got `int`"),
        ("port = 65536", "port is 65536; expected `int` <= 65535"),
        ('model = "a\\nb"', "model is 'a\\nb'; remove unprintable characters"),
        ('[decode]\nmode = "normal\\n"', "decode.mode is 'normal\\n'; known are '', 'normal'"),
        ("[prefill]\nunits = 4096\nranks = 64", "their units have 262,145 ranks together"),
        ("[prefill]\nrequest_balance = 'no_moves'", "which only decode has"),
    ],
)
def test_a_field_of_a_file_is_named_with_its_table(table: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "d.toml"
    file.write_text(table)
    with pytest.raises(ConfigError, match=re.escape(words)) as error:
        read_deployment(file)
    assert str(error.value).startswith(f"{file}: ")
    assert str(error.value).isprintable()


def test_a_unit_of_several_nodes_fills_them() -> None:
    assert Deployment(decode=UnitsConfig(ranks=144, redundant_experts=32)).decode.ranks == 144
    assert Deployment(decode=UnitsConfig(ranks=12, ranks_per_node=4)).decode.ranks_per_node == 4
    # A unit smaller than a node need not fill it.
    assert Deployment(decode=UnitsConfig(ranks=5)).decode.ranks == 5


def test_ranks_of_a_node_lie_side_by_side() -> None:
    many, few = UnitsConfig(ranks=12, ranks_per_node=4), UnitsConfig(ranks=5)
    assert many.nodes == (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2)
    found = [many.beside(rank) for rank in (0, 3, 4, 11)]
    assert found == [range(4), range(4), range(4, 8), range(8, 12)]
    assert (set(few.nodes), few.beside(4)) == ({0}, range(5))


def test_a_relative_model_is_looked_for_beside_the_file(tmp_path: Path) -> None:
    file = tmp_path / "d.toml"
    file.write_text('model = "here"\n')
    # Relative to the working folder, as nothing is beside the file yet.
    assert read_deployment(file).model == "here"
    (tmp_path / "here").mkdir()
    assert read_deployment(file).model == str(tmp_path / "here")
    assert read_deployment(file, model="there").model == "there"


def test_every_file_in_configs_is_a_deployment_with_known_names() -> None:
    names = {path.stem for path in CONFIGS.glob("*.toml")}
    assert names >= {"laptop", "laptop_ep", "one_node", "v3_ep32_ep144"}
    for path in CONFIGS.glob("*.toml"):
        deployment = read_deployment(path)
        assert msgspec.structs.replace(deployment) == deployment
