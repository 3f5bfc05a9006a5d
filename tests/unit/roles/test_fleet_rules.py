"""Test the fleet that a deployment asks for."""

from __future__ import annotations

from typing import Any

import pytest

from hadal.core.config import Deployment, FleetConfig, UnitsConfig
from hadal.core.errors import ConfigError
from hadal.core.seams import StartUnit
from hadal.policy.scaling import Units
from hadal.roles.fleet.fleet import make_fleet, rules_of


def deployment(**fields: Any) -> Deployment:
    return Deployment(
        prefill=UnitsConfig(units=2, ranks=32),
        decode=UnitsConfig(ranks=144),
        fleet=FleetConfig("auto", **fields),
    )


def test_units_are_the_floor_and_the_fleets_table_says_the_most() -> None:
    rules = rules_of(
        deployment(prefill_max=29, decode_max=9, bundle_prefill=3, bundle_decode=1, start_s=300.0)
    )
    assert (rules.floor, rules.num_nodes_max) == (Units(2, 1), 278)
    assert (rules.prefill.unit_nodes, rules.decode.unit_nodes, rules.decode.num_max) == (4, 18, 9)
    assert (rules.prefill.num_bundle, rules.decode.num_bundle, rules.start_s) == (3, 1, 300.0)


def test_without_a_most_a_role_never_grows() -> None:
    rules = rules_of(deployment(decode_max=3))
    assert (rules.prefill.num_min, rules.prefill.num_max) == (2, 2)
    assert (rules.decode.num_min, rules.decode.num_max) == (1, 3)


def test_a_unit_that_shares_a_node_counts_as_one() -> None:
    rules = rules_of(Deployment(fleet=FleetConfig("auto", decode_max=3)))
    assert (rules.decode.unit_nodes, rules.num_nodes_max) == (1, 4)


def test_the_fleet_starts_with_the_floor() -> None:
    effects = make_fleet(deployment(prefill_max=4), 0.0).start(0.0)
    found = {e.unit for e in effects if isinstance(e, StartUnit)}
    assert found == {"prefill-0", "prefill-1", "decode-0"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prefill_max": 1}, r"prefill_max \(1\) is less than prefill.units, the minimum \(2\)"),
        ({"decode_use": 0.0}, "decode_use is 0.0; expected `float` > 0.0"),
        ({"prefill_use": 1.5}, "prefill_use is 1.5; expected `float` <= 1.0"),
        ({"start_s": 0.0}, "start_s is 0.0; expected `float` > 0.0"),
        ({"start_s": float("nan")}, "start_s is nan; expected `float` > 0.0"),
        ({"period_s": 1e5}, "period_s is 100000.0; expected `float` <= 86400.0"),
        ({"period_s": float("inf")}, "period_s is inf; expected `float` <= 86400.0"),
        ({"hold_s": -1.0}, "hold_s is -1.0; expected `float` >= 0.0"),
        ({"hold_s": 1e6}, "hold_s is 1000000.0; expected `float` <= 86400.0"),
        ({"decode_max": -1}, "decode_max is -1; expected `int` >= 0"),
        ({"prefill_tokens_per_s": float("nan")}, "prefill_tokens_per_s is nan; expected `float`"),
        ({"bundle_prefill": 3}, "a bundle has units of both roles"),
        ({"decode_tokens_per_s": -1.0}, "decode_tokens_per_s is -1.0; expected `float` >= 0.0"),
    ],
)
def test_what_cannot_work_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        deployment(**fields)


def test_a_mode_that_is_not_known_is_named() -> None:
    with pytest.raises(ConfigError, match=r"mode is 'on'; known are 'auto', 'off'"):
        Deployment(fleet=FleetConfig("on"))


def test_a_fleet_that_is_off_has_the_units_that_units_says() -> None:
    plain = Deployment(decode=UnitsConfig(units=2), fleet=FleetConfig(decode_max=5))
    assert (plain.num_units_max("decode"), plain.num_units_max("prefill")) == (2, 1)
    assert deployment(decode_max=5).num_units_max("decode") == 5
