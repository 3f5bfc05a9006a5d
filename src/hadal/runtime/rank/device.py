"""The device of a rank's process: acquired, checked, and set to full precision.

KV and activations are FP32 on every device so far. On a GPU, weights are FP32 too, so that greedy
tokens equal the CPU's. Ops on a GPU are plain torch; BF16 and FP8 come with fused kernels, and
`--dry-run` plans their memory for an FP8 checkpoint. Independent of models and units.
"""

from __future__ import annotations

import torch

from hadal.core.errors import ConfigError
from hadal.runtime.devices import take_gpu

_WARM_UP = 64
ONLY_GPU = "cuda:0"
"""The one GPU that the process sees."""


def open_device(gpu: int | None) -> str:
    """Acquire the device of this rank, and return "cpu" or "cuda:0". `gpu`: number of the GPU on
    its node; None: the CPU. Raises ConfigError if torch sees no GPU.
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
    # Load the libraries now: in the first step that could take longer than the limit of one op.
    ones = torch.ones(_WARM_UP, _WARM_UP, device=ONLY_GPU)
    (ones @ ones).softmax(-1).sum().item()
    return ONLY_GPU
