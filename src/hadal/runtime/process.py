"""What every child process of `hadal serve` does first: die with its parent, log under its name, read the run folder.

Knows no role and loads no torch.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import logging
import os
import resource
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hadal.core.config import ROLES, Deployment
from hadal.core.errors import ConfigError

EXIT_CONFIG = 2
"""The model or the configuration cannot work: starting again would not help."""
EXIT_STUCK = 70
"""A step took longer than its deadline."""
EXIT_FATAL = 71
"""A bug: the leader or an effect raised."""

MAX_DESCRIPTORS = 1 << 16
_PR_SET_PDEATHSIG = 1  # prctl(2)
_RUN_FILE = "run.json"
LISTEN_FD = "HADAL_LISTEN_FD"
"""Environment variable: the gateway's listening socket, opened by the supervisor so that it outlives the gateway."""
API_KEYS = "HADAL_API_KEYS"
"""Environment variable: the keys that the gateway lets in, with commas between. Empty: everybody is let in."""


@dataclass(frozen=True)
class Run:
    """What the supervisor tells every process, as `run.json` in the run folder."""

    run_id: str
    supervisor_pid: int
    deployment: Deployment
    """Resolved: no field is left to be derived."""
    log_level: str = "info"
    fingerprint: str = ""
    """What KV depends on besides its text (runtime/fingerprint); empty where the cache is off."""


def write_run(folder: Path, run: Run) -> None:
    """Write `run.json`, for this user alone: the ledger's URL may hold a password."""
    path = folder / _RUN_FILE
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(run)))


def read_run(folder: Path) -> Run:
    """Read `run.json`. Raises ConfigError if it is not there or not ours."""
    path = folder / _RUN_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Run)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: not the run folder of a supervisor ({error}).") from error


def unit_arguments(description: str | None, *, of_rank: bool = False) -> argparse.Namespace:
    """The command line of a unit's process: unit, role, folder and, `of_rank`, rank."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unit", required=True, help="the unit's name on the wire, such as decode-0")
    parser.add_argument("--role", required=True, choices=ROLES)
    if of_rank:
        parser.add_argument("--rank", required=True, type=int, help="place in the unit, from 0")
    parser.add_argument("--folder", type=Path, required=True, help="run folder of the supervisor")
    return parser.parse_args()


def enter_child(folder: Path) -> Run:
    """First call of a child process: read the run, make sure that it ends when the supervisor does, set up its log."""
    faulthandler.enable()
    run = read_run(folder)
    die_with(run.supervisor_pid)
    raise_descriptor_limit()
    # The supervisor puts the process's name before every line. Milliseconds: what ranks notice is compared by them.
    logging.basicConfig(
        level=run.log_level.upper(), stream=sys.stderr, datefmt="%H:%M:%S",
        format="%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s",
    )  # fmt: skip
    return run


def raise_descriptor_limit() -> None:
    """Be allowed MAX_DESCRIPTORS open files, or as many as may be had: a leader holds every segment of the disk cache
    open, and where the soft limit is the usual 1,024 it would run out at sixteen writers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def die_with(parent_pid: int) -> None:
    """Be killed by the kernel the moment the parent ends, however it ends. Linux; elsewhere only the check is made."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # It ended before the call above.
        sys.exit(f"process {parent_pid}, which started this one, is gone.")
