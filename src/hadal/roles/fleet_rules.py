"""A fleet as a deployment asks for it: its [fleet] table beside the floor that its units' tables
say.
"""

from __future__ import annotations

from hadal.core.config import DECODE, PREFILL, Deployment
from hadal.core.errors import ConfigError
from hadal.policy.scaling import RoleRules, ScalingRules
from hadal.roles.fleet import Fleet


def rules_of(deployment: Deployment) -> ScalingRules:
    """The rules. A unit that is smaller than a node counts as one. Raises ConfigError for rules
    nobody can keep.
    """
    fleet = deployment.fleet

    def role(name: str) -> RoleRules:
        is_prefill = name == PREFILL
        units = deployment.prefill if is_prefill else deployment.decode
        return RoleRules(
            unit_nodes=-(-units.ranks // units.ranks_per_node),
            use=fleet.prefill_use if is_prefill else fleet.decode_use,
            num_min=units.units,
            num_max=deployment.num_units_max(name),
            num_bundle=fleet.bundle_prefill if is_prefill else fleet.bundle_decode,
        )

    prefill, decode = role(PREFILL), role(DECODE)
    try:
        return ScalingRules(
            prefill,
            decode,
            prefill.num_max * prefill.unit_nodes + decode.num_max * decode.unit_nodes,
            start_s=fleet.start_s,
            period_s=fleet.period_s,
            hold_s=fleet.hold_s,
            catch_up_s=fleet.start_s,
        )
    except ValueError as error:
        raise ConfigError(f"fleet: {error}") from error


def make_fleet(deployment: Deployment, day_s: float) -> Fleet:
    """The role; `day_s`: the time of day when its clock showed 0."""
    fleet = deployment.fleet
    return Fleet(
        rules_of(deployment),
        prefill_tokens_per_s=fleet.prefill_tokens_per_s,
        decode_tokens_per_s=fleet.decode_tokens_per_s,
        drain_timeout_s=fleet.drain_timeout_s,
        day_s=day_s,
    )
