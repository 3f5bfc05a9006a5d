"""The first lines of every process that `hadal serve` starts: end with the one that started it,
then be the module.

    python -P .../runtime/entry.py PARENT_PID MODULE [ARGUMENT ...]

A module's own imports take seconds, and minutes on a busy machine. A supervisor that is killed
meanwhile must not leave the process behind, so this file is run by its path and imports nothing of
ours.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2)


def die_with(parent_pid: int) -> None:
    """Be killed by the kernel the moment the parent ends, however it ends. Linux; elsewhere only
    the check is made.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # It ended before the call above.
        sys.exit(f"process {parent_pid}, which started this one, is gone.")


def main() -> None:
    """Run the module that the command line names, with the arguments that follow it."""
    die_with(int(sys.argv[1]))
    module = sys.argv[2]
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
