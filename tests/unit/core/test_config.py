"""A deployment is checked at birth, and says which field cannot work and what to do about it."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from hadal.core.config import Deployment, LedgerConfig, UnitsConfig, read_deployment
from hadal.core.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"wire": "fp16"}, "wire is 'fp16'; known are 'fp32', 'fp8', 'fp8_pow2'"),
        ({"transport": "udp"}, "transport is 'udp'"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"device": "cpu", "transport": "nccl"}, "needs GPUs, and device is 'cpu'"),
        ({"device_memory_gb": -1.0}, "device_memory_gb cannot be negative"),
        ({"rank_timeout_s": 0.5}, "rank_timeout_s is 0.5; ranks report every 0.25 s"),
        ({"collective_timeout_s": 1.0}, "collective_timeout_s .* must exceed rank_timeout_s"),
        (
            {"unit_timeout_s": 5.0, "rank_timeout_s": 6.0},
            "unit_timeout_s must exceed rank_timeout_s",
        ),
        (
            {"ledger": LedgerConfig(gpu_hour_usd=-1.0)},
            "ledger.gpu_hour_usd is -1.0; 0 to 1e6 dollars",
        ),
        ({"collective_timeout_s": 0.0}, "collective_timeout_s is 0.0; it must be positive"),
    ],
)
def test_a_field_that_cannot_work_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Deployment(**fields)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ranks": 0}, "ranks is 0; it must be at least 1"),
        ({"ranks_per_node": 0}, "ranks_per_node is 0"),
        ({"ranks": 12}, "ranks is 12, which does not fill nodes of 8"),
        ({"ranks": 4, "redundant_experts": -1}, "redundant_experts cannot be negative"),
        ({"redundant_experts": 8}, "no second rank to hold a replica"),
        ({"overlap": "dual"}, "overlap is 'dual'; known are 'auto'"),
        ({"mode": "fast"}, "mode is 'fast'"),
        ({"min_split_tokens": -1}, "min_split_tokens cannot be negative"),
    ],
)
def test_a_field_of_the_units_is_named_with_their_kind(
    kind: str, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{kind}.*{words}"):
        Deployment(**{kind: UnitsConfig(**fields)})


def test_a_unit_of_several_nodes_fills_them() -> None:
    assert Deployment(decode=UnitsConfig(ranks=144, redundant_experts=32)).decode.ranks == 144
    assert Deployment(decode=UnitsConfig(ranks=12, ranks_per_node=4)).decode.ranks_per_node == 4
    assert Deployment(decode=UnitsConfig(ranks=5)).decode.ranks == 5, (
        "less than a node need not fill one"
    )


def test_a_relative_model_is_looked_for_beside_the_file(tmp_path: Path) -> None:
    file = tmp_path / "d.toml"
    file.write_text('model = "here"\n')
    assert read_deployment(file).model == "here", (
        "in the working folder, as nothing is beside the file"
    )
    (tmp_path / "here").mkdir()
    assert read_deployment(file).model == str(tmp_path / "here")
    assert read_deployment(file, model="there").model == "there"


def test_every_file_in_configs_is_a_deployment_with_known_names() -> None:
    names = {path.stem for path in CONFIGS.glob("*.toml")}
    assert names >= {"laptop", "laptop_ep", "one_node", "v3_ep32_ep144"}
    for path in CONFIGS.glob("*.toml"):
        deployment = read_deployment(path)
        assert dataclasses.replace(deployment) == deployment
