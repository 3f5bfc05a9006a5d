"""Muon for the hidden matrices, AdamW for the rest, both scaled by one schedule over the steps.

Muon: Jordan et al. 2024 (momentum, orthogonalised by five Newton-Schulz steps); the factor 0.2
sqrt(larger side), which gives its updates AdamW's size, is Moonlight's (arXiv 2502.16982). Experts
are orthogonalised as a batch of matrices.
"""

import torch
from torch import Tensor, nn

from train.experts import kernels


def schedule(progress: float) -> float:
    """Return the learning-rate factor at `progress` in 0..1: warm up, hold, fall as 1 - sqrt (arXiv
    2405.18392).
    """
    if progress < 0.015:
        return max(progress, 0.0005) / 0.015
    return 1.0 - (min(1.0, max(0.0, progress - 0.35) / 0.65)) ** 0.5


@torch.no_grad()
def orthogonalise(g: Tensor) -> Tensor:
    """Return the nearest semi-orthogonal matrices to g [..., rows, cols], roughly: singular values
    near 1.
    """
    wide = g.shape[-2] <= g.shape[-1]
    # Not in bf16, for which many CPUs have no instructions: there it took more than half of a step.
    x = (g if wide else g.mT).float()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return (x if wide else x.mT).to(g.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised: one step turns and moves a matrix by the same amount in every
    direction.
    """

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.95, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["buffer"] = torch.zeros_like(p)
                buffer = state["buffer"]
                if p.ndim == 3 and kernels() is not None:
                    # Gate and up of an expert are two matrices, one above the other.
                    rows = p.shape[1] // 2 if p.shape[1] < p.shape[2] else p.shape[1]
                    rates = group["lr"], group["momentum"], group["weight_decay"]
                    kernels().muon_step(p, p.grad.contiguous(), buffer, rows, p.shape[2], *rates)
                    continue
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(buffer, group["momentum"])
                if (
                    p.ndim == 3 and p.shape[1] < p.shape[2]
                ):  # gate and up are two matrices of one expert
                    update = update.unflatten(1, (2, -1))
                scale = 0.2 * max(update.shape[-2:]) ** 0.5
                update = orthogonalise(update).reshape(p.shape)
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(
                    update, alpha=-group["lr"] * scale
                )


def make_optimizers(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for projections and experts, AdamW for embedding, head, gate and norms; base
    rates noted.
    """
    hidden, gates, rest = [], [], []
    for name, p in model.named_parameters():
        if "proj" in name:
            hidden.append(p)
        elif "gate.weight" in name:
            gates.append(p)
        else:
            rest.append(p)
    groups = [{"params": rest, "lr": 0.4 * lr}, {"params": gates, "lr": 0.15 * lr}]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    optimizers = [Muon(hidden, lr), adam]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return optimizers
