"""The device of a rank's process: taken, checked, and told how exact to be.

KV and activations are FP32 on every device so far, and on a GPU weights, too: then it gives the
CPU's greedy tokens. Ops on a GPU are plain torch; BF16 and FP8 come with fused kernels, whose
memory `--dry-run` plans where the checkpoint is FP8. Knows no model and no unit.
"""

from __future__ import annotations

import torch

from hadal.core.errors import ConfigError
from hadal.runtime.devices import take_gpu

_WARM_UP = 64
ONLY_GPU = "cuda:0"
"""The one GPU that the process sees."""


def open_device(gpu: int | None) -> str:
    """The device that this rank computes on, "cpu" or "cuda:0": of the node's GPUs number `gpu`.
    Raises ConfigError where torch sees no GPU.
    """
    if gpu is None:
        return "cpu"
    take_gpu(gpu)
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device is 'cuda', and torch {torch.__version__} sees no GPU. Install a torch built"
            " for CUDA and a driver for it, or take device 'cpu'."
        )
    torch.set_float32_matmul_precision("highest")  # TF32 would change tokens.
    # Loads the libraries now: in the first step it could take longer than a rank may stand in one
    # op.
    ones = torch.ones(_WARM_UP, _WARM_UP, device=ONLY_GPU)
    (ones @ ones).softmax(-1).sum().item()
    return ONLY_GPU
