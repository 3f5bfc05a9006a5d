"""Stacks of all processes that a test started, for the report of a hanging test.

Every process of a pytest worker inherits `VARIABLE`, so that it is found under any parent.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "HADAL_TESTS_OF"
"""Environment variable: id of the pytest process that started a process, directly or not."""
_DUMP_S = 20.0
_PY_SPY = Path(sys.executable).with_name("py-spy")


def mark() -> None:
    """Mark this process's children, from now on."""
    os.environ[VARIABLE] = str(os.getpid())


def processes() -> Iterator[int]:
    """Yield the ids of all processes that this pytest process started, directly or not."""
    wanted = f"{VARIABLE}={os.getpid()}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)
        except OSError:
            continue  # It ended, or belongs to another account.


def dump() -> str:
    """Return the stacks of this process and of all that it started, as text."""
    return "\n".join(_dump(pid) for pid in sorted({os.getpid(), *processes()}))


def _dump(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        waits = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return f"process {pid} has ended"
    head = f"process {pid} ({waits or 'runs'}): {command[:200]}"
    if not _PY_SPY.exists() and shutil.which("py-spy") is None:
        return f"{head}\n  py-spy is not installed: make setup"
    program = str(_PY_SPY) if _PY_SPY.exists() else "py-spy"
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=_DUMP_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{head}\n  py-spy got no stack within {_DUMP_S:.0f} s"
    return f"{head}\n{done.stdout or done.stderr}"
