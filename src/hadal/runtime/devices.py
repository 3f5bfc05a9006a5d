"""The accelerators of this machine, asked without loading torch: the supervisor decides with it,
ranks use them.

Knows NVIDIA's tools only. A machine without them, or a torch without CUDA, has no GPUs.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
from pathlib import Path

_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""Of x86 processors, those by which kernels differ, and with them the last bits of what they
compute.
"""
_QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
_TIMEOUT_S = 10.0
VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpus() -> tuple[int, ...]:
    """Memory in bytes of each GPU that torch here could use; empty if there is none."""
    if not Path("/dev/nvidiactl").exists() or not torch_has_cuda():
        return ()
    try:
        done = subprocess.run(
            _QUERY, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
        found = tuple(int(line) * 2**20 for line in done.stdout.splitlines() if line.strip())
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()
    visible = os.environ.get(VISIBLE)
    if visible is None:
        return found
    return found[: len([one for one in visible.split(",") if one.strip() and one.strip() != "-1"])]


def cpu_kind() -> str:
    """What this machine's kernels are made of; two machines with the same compute the same bits."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    flags = set(line.split())
    return " ".join((platform.machine(), *(name for name in _CPU_FLAGS if name in flags)))


def take_gpu(index: int) -> None:
    """Make the index-th GPU, counted round, the only one this process sees. Before its first call
    to CUDA.

    Whatever a thread or a library then takes for the present device is the rank's own.
    """
    visible = os.environ.get(VISIBLE)
    names = [str(number) for number in range(len(gpus()))]
    if visible is not None:
        names = [one.strip() for one in visible.split(",") if one.strip()]
    if names:
        os.environ[VISIBLE] = names[index % len(names)]


def torch_has_cuda() -> bool:
    """Whether the torch that is installed was built for CUDA, by its libraries."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    return (Path(found.origin).parent / "lib" / "libtorch_cuda.so").exists()
