"""Commands that install clients of others."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.waiting import DEADLINE_S


class Missing(RuntimeError):
    """Something cannot be installed here; the text gives the reason."""


def called(
    *command: str | Path, cwd: Path | None = None, timeout_s: float = DEADLINE_S, **env: str
) -> tuple[int, str, str]:
    """Run a command to its end or its deadline; return its exit status (124 at the deadline), output
    and errors.
    """
    try:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=cwd,
            env={**os.environ, "UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", ""), **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        return 124, output, f"still running after {timeout_s:.0f} s"
    return done.returncode, done.stdout, done.stderr


def install(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command that installs something; return its output. Raises Missing if it fails."""
    code, output, errors = called(*command, cwd=cwd)
    if code != 0:
        raise Missing(" ".join((errors or output).split())[-300:])
    return output


def install_python(folder: Path, *packages: str) -> None:
    """Make an environment of this Python with packages. Raises Missing."""
    uv = found("uv", "run make setup")
    install(uv, "venv", "-q", "--clear", "--python", sys.executable, folder)
    install(uv, "pip", "install", "-q", "--python", folder / "bin" / "python", *packages)


def found(program: str, how: str) -> Path:
    """Return the path of a program. `how`: what to do if it is not there. Raises Missing."""
    path = shutil.which(program, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if path is None:
        raise Missing(f"{program} is not there; {how}")
    return Path(path)
