"""The device of a rank's process: taken, checked, and told how exact to be.

Weights, KV and activations are FP32 on every device so far: then a GPU gives the CPU's greedy
tokens. Ops on a GPU are plain torch; BF16 and FP8 come with fused kernels, whose memory `--dry-run`
plans where the checkpoint is FP8.
"""

from __future__ import annotations

import torch

from hadal.core.config import Deployment
from hadal.core.errors import ConfigError
from hadal.runtime.devices import take_gpu
from hadal.runtime.topology import device_index

_WARM_UP = 64
_ONLY = "cuda:0"
"""Of the GPUs that the process sees: there is one."""


def open_device(deployment: Deployment, unit: str, rank: int = 0) -> str:
    """The device that this rank computes on, "cpu" or "cuda:0". Raises ConfigError where torch sees
    no GPU.
    """
    if deployment.device != "cuda":
        return "cpu"
    take_gpu(device_index(deployment, unit, rank))
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device is 'cuda', and torch {torch.__version__} sees no GPU. Install a torch built"
            " for CUDA and a driver for it, or take device 'cpu'."
        )
    torch.set_float32_matmul_precision("highest")  # TF32 would change tokens.
    # Loads the libraries now: in the first step it could take longer than a rank may stand in one
    # op.
    ones = torch.ones(_WARM_UP, _WARM_UP, device=_ONLY)
    (ones @ ones).softmax(-1).sum().item()
    return _ONLY
