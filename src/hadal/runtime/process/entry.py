"""First code of every process that `hadal serve` starts without a fork: make it end with its
parent, then run the module.

    python -P .../runtime/process/entry.py PARENT_PID MODULE [ARGUMENT ...]

A module's own imports take seconds, and minutes on a busy machine. A supervisor that is killed
meanwhile must not leave the process behind, so this file is run by its path and imports no module
of Hadal.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2)


def die_with(parent_pid: int) -> None:
    """Have the kernel kill this process the moment its parent ends, for any reason. On Linux;
    elsewhere only check that the parent still runs.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # The parent ended before the call above.
        sys.exit(f"process {parent_pid}, which started this one, is gone.")


def main() -> None:
    """Run the module that the command line names, with the arguments that follow it."""
    die_with(int(sys.argv[1]))
    module = sys.argv[2]
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
