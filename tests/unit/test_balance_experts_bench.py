"""The bench of expert placements: DeepSeek's EPLB is found in a folder and judged by its
placements; traffic is counted as documented.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench import balance_experts, balance_traffic
from bench.balance_experts import find_eplb, run_eplb
from bench.balance_traffic import Tokens, fitted_tokens, remote_nodes
from bench.shared_data import EXPERT_LOADS
from hadal.core.placement import Placement
from hadal.policy.experts.balance import Cluster
from tests.needs import shared_data

IN_ORDER = '''
import torch

def rebalance_experts(weight, num_replicas, num_groups, num_nodes, num_gpus):
    """Experts in order, then the first ones again."""
    layers, experts = weight.shape
    physical = (torch.arange(num_replicas) % experts).repeat(layers, 1)
    counts = torch.stack([torch.bincount(row, minlength=experts) for row in physical])
    return physical, None, counts
'''


@pytest.fixture
def eplb_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "eplb.py").write_text(IN_ORDER)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "eplb", raising=False)
    yield tmp_path
    sys.modules.pop("eplb", None)


def test_a_module_of_eplbs_signature_is_judged_by_its_arrays(eplb_folder: Path) -> None:
    found = find_eplb(str(eplb_folder))
    assert found is not None
    loads = np.array([[6.0, 2.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    # Experts 0 1 2 | 3 0 1: ranks get 3 + 1 + 1 and 1 + 3 + 1; in the second layer both get
    # 1/2 + 1/2 + 1.
    mean, worst, ms = run_eplb(found, loads, "global", 2, 3)
    assert (mean, worst) == pytest.approx((1.0, 1.0))
    assert ms >= 0
    mean, worst, _ = run_eplb(found, np.array([[6.0, 2.0, 3.0, 1.0]]), "global", 2, 3)
    assert mean == worst == pytest.approx(6 / 7)


def test_the_bench_runs_a_given_eplb_beside_ours(
    eplb_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shared_data(EXPERT_LOADS)
    monkeypatch.setattr(
        balance_experts, "CASES", (("prefill 32", "global", 32, 9, ("prefill_in512",)),)
    )
    for name in ("replans", "windows", "traffic"):
        monkeypatch.setattr(balance_experts, name, lambda *_, **__: None)
    balance_experts.main(["--quick", "--eplb", str(eplb_folder)])
    row = next(line for line in capsys.readouterr().out.splitlines() if "prefill 32" in line)
    ours, theirs = (float(cell) for cell in re.findall(r"([01]\.\d{4}) /", row))
    assert ours > 0.999
    assert 0.2 < theirs < 0.8, "experts in order are far from balanced"
    assert "*" not in row, "a figure from elsewhere where the module was given"


def test_a_token_crosses_once_to_a_node() -> None:
    # Node 0 has experts 0 and 1, node 1 experts 2 and 3, and so on: 8 experts, 4 nodes of one rank.
    cluster = Cluster.even(4, 4, 2)
    placement = Placement(8, np.arange(8, dtype=np.int16).reshape(1, 4, 2))
    everywhere = Tokens(np.arange(8)[None], np.array([0]))
    assert remote_nodes(placement, 0, everywhere, cluster, local_first=False) == 3.0
    at_home = Tokens(np.array([[2, 3, 2, 3, 2, 3, 2, 3]]), np.array([1]))
    assert remote_nodes(placement, 0, at_home, cluster, local_first=False) == 0.0


def test_local_replicas_save_crossings() -> None:
    cluster = Cluster.even(4, 4, 1)
    placement = Placement(1, np.zeros((1, 4, 1), np.int16))
    tokens = Tokens(np.zeros((8, 8), np.int64), np.arange(8) % 4)
    assert remote_nodes(placement, 0, tokens, cluster, local_first=True) == 0.0
    assert remote_nodes(placement, 0, tokens, cluster, local_first=False) == 3.0


def test_the_routing_model_meets_the_loads_and_the_gates_limits() -> None:
    loads = np.random.default_rng(3).lognormal(0, 0.65, 256)
    tokens = fitted_tokens(loads, 1024, np.random.default_rng(4))
    got = np.bincount(tokens.experts_NK.ravel(), minlength=256)
    assert np.corrcoef(got, loads)[0, 1] > 0.97
    groups = np.sort(tokens.experts_NK // 32, axis=1)
    assert ((np.diff(groups, axis=1) > 0).sum(axis=1) + 1).max() <= balance_traffic.TOP_GROUPS
    assert all(len(set(row)) == balance_traffic.TOP_EXPERTS for row in tokens.experts_NK.tolist())
