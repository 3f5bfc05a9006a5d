"""Accelerators of this machine, found without loading torch. The supervisor plans with them, and
each rank takes one.

Finds NVIDIA GPUs only, and none without nvidia-smi or with a torch without CUDA.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
from pathlib import Path

_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""x86 features by which kernels differ, and with them the last bits of their results."""
_QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
_TIMEOUT_S = 10.0
VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpus() -> tuple[int, ...]:
    """Return the memory in bytes of each GPU that torch could use here; empty if there is none."""
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
    """Return the CPU properties that select kernels; with equal text, machines compute equal bits."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    flags = set(line.split())
    return " ".join((platform.machine(), *(name for name in _CPU_FLAGS if name in flags)))


def take_gpu(index: int) -> None:
    """Make the index-th GPU, modulo their number, the only one visible to this process. Must be
    called before the first CUDA call.

    Every thread or library that uses the current device then uses this GPU.
    """
    visible = os.environ.get(VISIBLE)
    names = [str(number) for number in range(len(gpus()))]
    if visible is not None:
        names = [one.strip() for one in visible.split(",") if one.strip()]
    if names:
        os.environ[VISIBLE] = names[index % len(names)]


def torch_has_cuda() -> bool:
    """Return whether the installed torch was built for CUDA, by its library files."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    return (Path(found.origin).parent / "lib" / "libtorch_cuda.so").exists()
