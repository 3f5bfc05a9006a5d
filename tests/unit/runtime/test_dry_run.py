"""Test the plan of the whole published deployment, without a tensor, and its text for people."""

import io
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from hadal.comm.layout import MessageLayout, deepep_buffer_bytes
from hadal.core.config import ClusterConfig, Deployment, UnitsConfig, read_deployment
from hadal.core.errors import ConfigError
from hadal.overlap.plan import SCHEDULES, order
from hadal.roles.leaders import first_placement
from hadal.runtime.parameters import num_moe_layers
from hadal.runtime.plan_rows import print_plan, sections
from hadal.runtime.resolve import Resolved, plan, resolve, why_not_run

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


@pytest.fixture(scope="module")
def v3() -> Resolved:
    return plan(read_deployment(CONFIGS / "v3_ep32_ep144.toml"))


def text_of(resolved: Resolved) -> str:
    file = io.StringIO()
    print_plan(resolved, why_not_run(resolved), Console(file=file, highlight=False, soft_wrap=True))
    return file.getvalue()


@pytest.mark.parametrize(
    ("role", "num_ranks", "num_slots"), [("prefill", 32, 9), ("decode", 144, 2)]
)
def test_the_published_placement_is_288_replicas_in_58_layers(
    v3: Resolved, role: str, num_ranks: int, num_slots: int
) -> None:
    """DeepSeek-V3/R1 inference overview: 9 routed + 1 shared experts per GPU in prefill, 2 + 1 in
    decode.
    """
    placement = first_placement(v3.deployment, v3.config, role)
    assert placement.slot_to_expert_LRS.shape == (58, num_ranks, num_slots)
    assert placement.check() == []
    counts = np.stack(
        [np.bincount(layer.reshape(-1), minlength=256) for layer in placement.slot_to_expert_LRS]
    )
    assert counts.sum(axis=1).tolist() == [288] * 58
    assert ((counts == 1) | (counts == 2)).all()
    assert v3.config.n_shared_experts == 1


def test_the_published_messages_and_buffers(v3: Resolved) -> None:
    """DeepEP: 7,408 bytes out, 14,336 back; 2.15 GB for 128 tokens and 288 replicas."""
    layout = MessageLayout(v3.deployment.dispatch_format, v3.config.hidden_size)
    assert (layout.message_bytes, layout.back_bytes) == (7408, 14336)
    assert v3.deployment.decode.max_requests == 128
    assert v3.memory.decode.comm_bytes == deepep_buffer_bytes(128, 7168, 288)
    assert round(v3.memory.decode.comm_bytes / 1e9, 2) == 2.15


def test_the_published_weights_of_a_rank(v3: Resolved) -> None:
    """Expect 24.2 and 42.1 GB within 1 %: they were computed with a BF16 gate, and ours is FP32."""
    assert v3.memory.decode.weight_bytes / 1e9 == pytest.approx(24.2, rel=0.01)
    assert v3.memory.prefill.weight_bytes / 1e9 == pytest.approx(42.1, rel=0.01)
    assert v3.memory.block_bytes == 64 * 70_272
    for rank in (v3.memory.prefill, v3.memory.decode):
        assert rank.total_bytes < 80e9


def test_the_published_schedules_run_every_op_of_every_layer(v3: Resolved) -> None:
    layers = num_moe_layers(v3.config)
    for name in (v3.deployment.prefill.overlap, v3.deployment.decode.overlap):
        steps = list(order(SCHEDULES[name], layers, 2))
        assert len(steps) == len(set(steps)) == 2 * layers * len(SCHEDULES[name].ops)


@pytest.mark.promise("--dry-run shows topology, memory, placement and messages of any deployment")
@pytest.mark.promise("what would run where, in how much memory; starts nothing")
def test_what_a_person_reads_of_the_published_plan(v3: Resolved) -> None:
    text = text_of(v3)
    for words in (
        "240 ranks (GPUs) on 30 nodes",
        "EP144, nodes 12-29",
        "9 routed + 1 shared, in each of 58 layers",
        "2 routed + 1 shared",
        "7,408 bytes per message",
        "14,336 bytes per row",
        "DeepEP 2.15 GB",
        "decode_five",
        "prefill_dual",
        "a second copy of one layer's experts",
        "cannot run on this host: it needs 30 nodes of 8 GPUs",
    ):
        assert words in text


def test_serving_it_here_is_refused_in_one_line(v3: Resolved) -> None:
    with pytest.raises(ConfigError, match="needs 30 nodes"):
        resolve(v3.deployment)


@pytest.mark.promise("--dry-run shows topology, memory, placement and messages of any deployment")
def test_every_configuration_makes_a_plan() -> None:
    for path in sorted(CONFIGS.glob("*.toml")):
        resolved = plan(read_deployment(path))
        assert {title.partition(":")[0] for title, _ in sections(resolved)} >= {"prefill", "decode"}


def test_the_laptops_units_of_many_ranks_run_on_any_host() -> None:
    resolved = plan(read_deployment(CONFIGS / "laptop_ep.toml"))
    assert (resolved.deployment.prefill.ranks, resolved.deployment.decode.ranks) == (2, 4)
    assert why_not_run(resolved) == []
    assert "this host can run it" in text_of(resolved)
    assert "72 routed + 1 shared" in text_of(resolved)


def test_a_plan_that_is_wrong_everywhere_names_the_field() -> None:
    with pytest.raises(ConfigError, match=r"Set decode\.redundant_experts to 2"):
        plan(Deployment(device="cpu", decode=UnitsConfig(ranks=3, redundant_experts=1)))


def test_a_cluster_is_told_what_no_host_can_run() -> None:
    """The cluster's hosts cannot be inspected here; what the deployment says about them is enough."""
    asked = read_deployment(CONFIGS / "v3_ep32_ep144.toml")
    on_ray = msgspec.structs.replace(asked, cluster=ClusterConfig(on="ray"))
    found = plan(on_ray)
    reasons = why_not_run(found)
    assert "deepep" in reasons[0]
    assert reasons[1].startswith("a prefill rank needs 2")
    assert "cannot run on a cluster: transport" in text_of(found)
    small = plan(Deployment(device="cpu", cluster=ClusterConfig(on="ray")))
    assert why_not_run(small) == []
    assert "a cluster can run it" in text_of(small)
