"""Muon for the hidden matrices, AdamW for the rest, both scaled by one schedule over the steps.

Muon: Jordan et al. 2024 (momentum, orthogonalised by five Newton-Schulz steps). The factor 0.2
sqrt(larger side) gives its updates the size of AdamW's (Moonlight, arXiv 2502.16982). Experts are
orthogonalised as a batch of matrices.
"""

import torch
from torch import Tensor, nn

from train.experts import kernels


def schedule(progress: float) -> float:
    """Return the learning-rate factor at `progress` in 0..1: it rises until 0.015, is 1 until 0.2, then falls
    as 1 - sqrt (arXiv 2405.18392).
    """
    if progress < 0.015:
        return max(progress, 0.0005) / 0.015
    return 1.0 - (min(1.0, max(0.0, progress - 0.2) / 0.8)) ** 0.5


@torch.no_grad()
def orthogonalise(g: Tensor) -> Tensor:
    """Return roughly the nearest semi-orthogonal matrices to g [..., rows, cols]: singular values
    are near 1.
    """
    wide = g.shape[-2] <= g.shape[-1]
    # Not in bf16: many CPUs have no instructions for it, and on these it took more than half of a
    # step.
    x = (g if wide else g.mT).float()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return (x if wide else x.mT).to(g.dtype)


class Muon(torch.optim.Optimizer):
    """Optimiser that orthogonalises the momentum, so that a step moves a matrix by the same amount in every
    direction.
    """

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.95, "weight_decay": 0.1})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p]["buffer"] = torch.zeros_like(p)
            rates = group["lr"], group["momentum"], group["weight_decay"]
            if (fast := kernels()) is not None:
                grads = [p.grad.contiguous() for p in params]
                buffers = [self.state[p]["buffer"] for p in params]
                fast.muon_step(params, grads, buffers, [*map(_num_rows, params)], *rates)
                continue
            for p in params:
                _step(p, self.state[p]["buffer"], *rates)


def _num_rows(p: Tensor) -> int:
    """Return the number of rows of each matrix in a parameter. Gate and up of an expert are two matrices, one
    above the other.
    """
    is_pair = p.ndim == 3 and p.shape[1] < p.shape[2]
    return p.shape[-2] // (2 if is_pair else 1)


def _step(p: Tensor, buffer: Tensor, lr: float, momentum: float, weight_decay: float) -> None:
    """Update one parameter in place, in plain torch."""
    buffer.lerp_(p.grad, 1 - momentum)
    update = p.grad.lerp(buffer, momentum).view(-1, _num_rows(p), p.shape[-1])
    scale = 0.2 * max(update.shape[-2:]) ** 0.5
    p.mul_(1 - lr * weight_decay).add_(orthogonalise(update).reshape(p.shape), alpha=-lr * scale)


def make_optimizers(model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Return Muon for projections and experts, and AdamW for embedding, head, gate and norms. Each group
    stores its learning rate as `base_lr`.
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
