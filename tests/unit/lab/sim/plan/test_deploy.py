"""A plan as a deployment: it is valid, it equals the plan, and its file is read back equal."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hadal.core.config import read_deployment, to_toml
from hadal.lab.sim.plan.day import DayRules
from hadal.lab.sim.plan.deploy import deployment_of, heading_of, notes_of
from hadal.lab.sim.plan.plan import SearchOptions, price_hardware
from hadal.lab.sim.world.units import kv_blocks
from hadal.perf.shapes import kv_bytes_per_token
from hadal.roles.fleet.fleet import rules_of
from hadal.runtime.resolve import plan as resolve
from tests.unit.lab.sim.plan.test_plan import best
from tests.unit.lab.sim.plans import small

MORE_HARDWARE = pytest.mark.more("other hardware")
MODEL = Path(__file__).resolve().parents[5] / "configs" / "deepseek_v3"


@pytest.mark.parametrize(
    "hardware", ["h800", *(pytest.param(name, marks=MORE_HARDWARE) for name in ("h200", "gb200"))]
)
def test_the_file_is_the_plan_and_fits_where_it_was_planned(hardware: str, tmp_path: Path) -> None:
    plan = best(hardware=hardware)
    made = deployment_of(plan, model=str(MODEL))
    path = tmp_path / "plan.toml"
    path.write_text(to_toml(made, heading_of(plan), notes_of(plan)), encoding="utf-8")
    read = read_deployment(path)
    assert read == made
    found = (read.prefill.ranks, read.decode.ranks)
    assert found == (plan.prefill.num_ranks, plan.decode.num_ranks)
    assert read.decode.redundant_experts == plan.decode_unit.model.num_redundant
    assert read.chunk_tokens == plan.prefill_unit.chunk_tokens
    assert read.decode.max_requests >= plan.decode_unit.batch
    assert read.num_units_max("decode") == plan.decode.num_peak
    rules = rules_of(read)
    assert rules.decode.use == pytest.approx(plan.decode.use, abs=1e-4)
    assert rules.floor.prefill == plan.prefill.num_least
    memory = resolve(read).memory
    for rank in (memory.prefill, memory.decode):
        assert rank.total_bytes <= plan.hardware.hbm_bytes
    model = plan.decode_unit.model
    planned = kv_blocks(model) * 64 * kv_bytes_per_token(model.model)
    assert memory.decode.kv_bytes == pytest.approx(planned, rel=0.01)
    assert read.decode.drafts == 0


@pytest.mark.promise(
    "One draft is therefore priced as a what-if. --mtp-tokens asks for drafts, and "
    "the deployment then makes them"
)
@pytest.mark.parametrize("num", [1, 3])
def test_a_plan_with_drafts_makes_them_and_has_room_for_what_they_take(num: int) -> None:
    plan = best(mtp_tokens=(num,))
    made = deployment_of(plan, model=str(MODEL))
    assert (made.prefill.drafts, made.decode.drafts) == (0, num)
    memory, model = resolve(made).memory, plan.decode_unit.model
    for rank in (memory.prefill, memory.decode):
        assert rank.total_bytes <= plan.hardware.hbm_bytes
    planned = kv_blocks(model, num) * 64 * kv_bytes_per_token(model.model, 62)
    assert 0.9 < memory.decode.kv_bytes / planned <= 1.0, "less where buffers are large"
    assert kv_blocks(model, num) < kv_blocks(model)


def test_a_static_fleet_and_a_part_have_no_fleet_table() -> None:
    found = small()
    static = price_hardware(
        found.pricing, found.rent, SearchOptions(rules=DayRules(is_static=True))
    ).ranked()[0]
    made = deployment_of(static)
    assert not made.fleet.is_on
    seen = (made.prefill.units, made.decode.units)
    assert seen == (static.prefill.num_peak, static.decode.num_peak)
    part = deployment_of(found.ranked()[0], num_prefill=2, num_decode=3)
    assert (part.prefill.units, part.decode.units, part.fleet.is_on) == (2, 3, False)


def test_it_says_what_it_counts_on() -> None:
    plan = best(hardware="gb200", dtypes=("fp4",), mtp_tokens=(1,))
    text = "\n".join(heading_of(plan))
    assert "MTP draft token" in text
    assert "FP4" in text
    assert "--cache-folder" in text
    alone = dataclasses.replace(plan, traffic=dataclasses.replace(plan.traffic, cached_share=0.0))
    assert "--cache-folder" not in "\n".join(heading_of(alone))
