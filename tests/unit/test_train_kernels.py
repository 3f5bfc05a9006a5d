"""The compiled pieces of training equal their plain twins, forward and backward."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hadal.kernels.build import cache_folder
from tests.needs import leave_out, need
from train import experts, optim

pytestmark = [
    pytest.mark.more("the compiler takes 20 s for them, and they are for training alone"),
    pytest.mark.slow("the first of them compiles"),
]
ROOT = Path(__file__).resolve().parents[2]
NUM_TOKENS = 70
NUM_EXPERTS = 16
BOUNDS = torch.tensor([0, 1, 66, 70])
"""Bounds of sequences shorter and longer than a block of query rows."""


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    experts.kernels.cache_clear()
    yield
    experts.kernels.cache_clear()


def need_kernels() -> None:
    if experts.kernels() is None:
        need("compiler")
        leave_out("nothing to build the training kernels with", "make setup")


def both_ways(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> tuple[object, object]:
    """Return the results of `act` with the compiled pieces, and without."""
    monkeypatch.delenv("HADAL_PLAIN", raising=False)
    need_kernels()
    compiled = act()
    monkeypatch.setenv("HADAL_PLAIN", "1")
    experts.kernels.cache_clear()
    assert experts.kernels() is None
    return compiled, act()


def with_gradients(function: Callable[..., Tensor], *given: Tensor) -> list[Tensor | None]:
    """Return the result, and the gradients of a weighted sum of it."""
    leaves = [x.clone().requires_grad_() for x in given]
    out = function(*leaves)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def chosen(k: int = 3) -> Tensor:
    """Draw the experts of each token; the last expert gets none."""
    return random(NUM_TOKENS, NUM_EXPERTS - 1).topk(k, dim=-1)[1]


def test_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = both_ways(
        monkeypatch, lambda: experts.route(random(NUM_TOKENS, NUM_EXPERTS), 4, 2, 3).sort()[0]
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (
            lambda x, gate_up, down, weights: experts.grouped_experts(
                x, gate_up, down, weights, chosen()
            ),
            [
                random(NUM_TOKENS, 24),
                random(NUM_EXPERTS, 16, 24),
                random(NUM_EXPERTS, 24, 8),
                random(NUM_TOKENS, 3).sigmoid(),
            ],
        ),
        (
            lambda q, k, v: experts.packed_attention(q, k, v, BOUNDS, 0.3),
            [random(NUM_TOKENS, 2, 12), random(NUM_TOKENS, 2, 12) + 1, random(NUM_TOKENS, 2, 8)],
        ),
        (
            lambda x, weight: experts.rms_norm(x, weight, 1e-6),
            [random(NUM_TOKENS, 24), random(24)],
        ),
    ],
    ids=["experts", "attention", "norm"],
)
def test_results_and_gradients(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Tensor], given: list[Tensor]
) -> None:
    ours, theirs = both_ways(monkeypatch, lambda: with_gradients(function, *given))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(NUM_EXPERTS, 16, 24), (NUM_EXPERTS, 24, 8), (3, 40, 96)])
def test_muon_steps(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    """Take two steps, with gate and up as two matrices each. Some gradients have rank one, like
    those of an expert with one token, and one is 0.
    """

    def step() -> Tensor:
        p = nn.Parameter(random(*shape))
        muon = optim.Muon([p], lr=0.01)
        for scale in (1.0, 1e-3):
            gradient = random(*shape) * scale
            gradient[0] = 0.0
            gradient[1] = torch.outer(random(shape[1]), random(shape[2]))
            p.grad = gradient
            muon.step()
        return p.detach() - random(*shape)

    ours, theirs = both_ways(monkeypatch, step)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-6)


def test_a_builder_that_was_killed_holds_up_nobody(tmp_path: Path) -> None:
    need_kernels()
    shutil.copytree(
        cache_folder() / "train", tmp_path / "train"
    )  # Already built, so that the test takes seconds.
    (tmp_path / "train" / "lock").touch()  # A lock that a killed builder left.
    code = "from train.experts import kernels; assert kernels() is not None"
    own = {**os.environ, "HADAL_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], timeout=300, check=True, cwd=ROOT, env=own)
