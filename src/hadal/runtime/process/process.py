"""First steps of every child process of `hadal serve`: read the run folder, log under its name.

Does not depend on any role's code, and does not load torch.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import logging
import os
import platform
import resource
import secrets
import shutil
import socket
import tempfile
import time
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

import msgspec

from hadal import __version__
from hadal.core.config import ROLES, Deployment
from hadal.core.errors import ConfigError
from hadal.core.messages.every import AnyMessage
from hadal.core.messages.fleet import Rollout
from hadal.runtime.process.logs import TEXT, start_log
from hadal.runtime.process.private import replace_private

log = logging.getLogger(__name__)

EXIT_STUCK = 70
"""Exit code: a step took longer than its deadline."""
EXIT_FATAL = 71
"""Exit code: an unexpected exception, for example of the leader or of an effect."""

EXIT_LEASE = 72
"""Exit code: an agent received no orders from its supervisor for the length of its lease."""

MAX_DESCRIPTORS = 1 << 16
RUN_FILE = "run.json"
FOLDER_PREFIX = "hadal-"
"""Prefix of the names of temporary run folders."""
_YOUNG_S = 60.0
"""A younger run folder is not stale: its process may not listen yet."""
_PROBE_S = 1.0
"""Timeout of the connection that tests if a process still listens."""
LISTEN_FD = "HADAL_LISTEN_FD"
"""Environment variable: the gateway's listening socket, which the supervisor opens and keeps."""
HAS_SERVED = "--has-served"
"""Argument of a restarted gateway: requests wait for missing processes, as they did before."""


@dataclass(frozen=True)
class Run:
    """Facts that the supervisor passes to every process, as `run.json` in the run folder."""

    run_id: str
    deployment: Deployment
    """The resolved deployment: no field is left to be derived."""
    log_level: str = "info"
    log_format: str = TEXT
    fingerprint: str = ""
    """Digest of everything besides the text that KV depends on (runtime/fingerprint)."""
    model_digest: str = ""
    """Digest of config.json and weights, of the start or last rollout (runtime/fingerprint)."""
    address: str = "127.0.0.1"
    """Address of this node as processes of other hosts reach it."""
    secret: bytes = field(default=b"", repr=False)
    """Secret by which the run's processes prove that they belong to it (core/handshake). It is
    stored in `run.json` and, for a cluster, in Ray's record of the agents (docs/cluster.md), but
    never in a name, an argument of a process, an environment, a log or a recording.
    """
    term: int = 1
    """Number of the run's supervisor among all that served under the cluster's name."""
    rollout: Rollout | None = None
    """The rollout in progress; None if there is none."""


def write_run(folder: Path, run: Run) -> None:
    """Write `run.json`, for this user alone: it has the secret, perhaps the ledger's password."""
    path, written_ns = folder / RUN_FILE, 0
    with contextlib.suppress(FileNotFoundError):
        written_ns = path.stat().st_mtime_ns
    replace_private(path, msgspec.json.format(msgspec.json.encode(run)))
    if written_ns:  # Keep its modification time: the time at which the server was started.
        os.utime(path, ns=(written_ns, written_ns))


def read_run(folder: Path) -> Run:
    """Read `run.json`. Raises ConfigError if it is missing or not valid."""
    path = folder / RUN_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Run)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: not the run folder of a supervisor ({error}).") from error


def is_listening(path: Path) -> bool:
    """Return True if a process listens on a Unix socket; a killed one leaves its file behind."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except TimeoutError:
            return True  # Its queue is full: the process may be stopped, but it exists.
        except OSError:
            return False
        return True


def remove_stale_folders() -> None:
    """Remove the run folders, and with them the secrets, of killed supervisors and agents: folders
    in which no process listens on a socket any more.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        try:
            is_old = time.time() - (folder / RUN_FILE).stat().st_mtime > _YOUNG_S
            is_ours = folder.stat().st_uid == os.geteuid()
            if is_old and is_ours and not any(map(is_listening, folder.glob("*.sock"))):
                shutil.rmtree(folder)
        except OSError as error:  # Not a run folder, or already gone.
            log.debug("cannot remove the old run folder %s: %s", folder, error)


def versions() -> dict[str, str]:
    """Return the versions of Hadal, Python and torch in this process, by name."""
    return {
        "hadal": __version__,
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def new_epoch() -> str:
    """Return an id that no other process has or had, on any host."""
    return f"{os.getpid()}-{secrets.token_hex(8)}"


def unit_arguments(description: str | None) -> argparse.Namespace:
    """Parse a unit process's command line: unit, role, folder, rollout, perhaps rank and GPU."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--unit", required=True, help="the unit's name on the wire, such as decode-0"
    )
    parser.add_argument("--role", required=True, choices=ROLES)
    parser.add_argument(
        "--rank", type=int, help="rank in the unit, from 0; if not given, the unit's leader"
    )
    parser.add_argument(
        "--device", type=int, help="number of the GPU on its node; if not given, the CPU"
    )
    parser.add_argument(
        "--model", default="", help="folder of the checkpoint; if not given, the run's"
    )
    parser.add_argument("--model-digest", default="", help="digest of that folder's weights")
    parser.add_argument(
        "--fingerprint", default="", help="fingerprint of all that KV depends on besides its text"
    )
    parser.add_argument(
        "--messages", default="", help="digest of the messages that the server uses"
    )
    add_epoch_arguments(parser)
    return parser.parse_args()


def rollout_arguments(rollout: Rollout, messages: str) -> tuple[str, ...]:
    """Return the additional arguments of a unit's process that is started for a rollout."""
    words = {
        "--model": rollout.model,
        "--model-digest": rollout.model_digest,
        "--fingerprint": rollout.fingerprint,
        "--messages": messages,
    }
    return tuple(f"{name}={value}" for name, value in words.items() if value)


def messages_digest() -> str:
    """Return a digest of all messages' fields. Processes that differ in it misread each other."""
    schema = msgspec.json.encode(msgspec.json.schema(AnyMessage))
    return blake2b(schema, digest_size=16).hexdigest()


def enter_unit(name: str, asked: argparse.Namespace) -> Run:
    """Read the run and set up the log: the first call of a unit's process. Return the run with the
    model that this process serves, which a rollout may have changed since the server's start.
    Raises ConfigError if the installed code and the running server have different messages.
    """
    run = enter_child(name, asked.folder)
    if asked.messages and asked.messages != messages_digest():
        raise ConfigError(
            f"hadal {__version__}, which is installed now, uses other messages than the running server."
            " Start a second server with the installed version, then stop this one."
        )
    if not asked.model:
        return run
    return dataclasses.replace(
        run,
        deployment=msgspec.structs.replace(run.deployment, model=asked.model),
        model_digest=asked.model_digest,
        fingerprint=asked.fingerprint,
    )


def add_epoch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that every process gets from its starter."""
    parser.add_argument("--folder", type=Path, required=True, help="run folder of this host")
    parser.add_argument(
        "--epoch-number", type=int, default=0, help="number of starts of processes of this name"
    )


def epoch_arguments(folder: Path, epoch_number: int) -> list[str]:
    """Return the arguments of `add_epoch_arguments` as words of a command line."""
    return ["--folder", str(folder), "--epoch-number", str(epoch_number)]


def enter_child(name: str, folder: Path) -> Run:
    """Read the run, raise the limit of open files and set up the log: a child's first call."""
    faulthandler.enable()
    run = read_run(folder)
    raise_descriptor_limit()
    start_log(name, run.log_level, run.log_format)
    return run


def raise_descriptor_limit() -> None:
    """Raise the limit of open files to MAX_DESCRIPTORS, or to the hard limit if that is lower. A
    leader holds every segment of the disk cache open; with the usual soft limit of 1,024 it would
    run out at sixteen writers.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
