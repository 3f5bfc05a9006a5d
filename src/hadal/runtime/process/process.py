"""What every child process of `hadal serve` does first: read the run folder, log under its name.

Knows no role and loads no torch.
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
"""A step took longer than its deadline."""
EXIT_FATAL = 71
"""A bug: the leader or an effect raised."""

EXIT_LEASE = 72
"""An agent heard nothing of its supervisor for its lease."""

MAX_DESCRIPTORS = 1 << 16
RUN_FILE = "run.json"
FOLDER_PREFIX = "hadal-"
"""What the names of run folders that nobody named begin with."""
_YOUNG_S = 60.0
"""A run folder that is younger may be of one who does not listen yet."""
_PROBE_S = 1.0
"""How long a supervisor may take to answer whether it is there."""
LISTEN_FD = "HADAL_LISTEN_FD"
"""Environment variable: the gateway's listening socket, opened by the supervisor so that it
outlives the gateway.
"""
HAS_SERVED = "--has-served"
"""Argument of a gateway that follows another: requests wait for what is missing, as they did
before.
"""


@dataclass(frozen=True)
class Run:
    """What the supervisor tells every process, as `run.json` in the run folder."""

    run_id: str
    deployment: Deployment
    """Resolved: no field is left to be derived."""
    log_level: str = "info"
    log_format: str = TEXT
    fingerprint: str = ""
    """What KV depends on besides its text (runtime/fingerprint)."""
    model_digest: str = ""
    """Of config.json and the weights that the server was started with (runtime/fingerprint)."""
    address: str = "127.0.0.1"
    """Of this node, where processes of other hosts reach those of this one."""
    secret: bytes = field(default=b"", repr=False)
    """What its processes prove themselves by (core/handshake). It stands in `run.json` and, of a
    cluster, in what Ray keeps of the agents (docs/cluster.md): in no name, argument of a process,
    environment, log or recording.
    """
    term: int = 1
    """Number of its supervisor among all that served under the cluster's name."""
    rollout: Rollout | None = None
    """One that is not over."""


def write_run(folder: Path, run: Run) -> None:
    """Write `run.json`, for this user alone: it holds the secret, and the ledger's URL may hold a
    password.
    """
    path, written_ns = folder / RUN_FILE, 0
    with contextlib.suppress(FileNotFoundError):
        written_ns = path.stat().st_mtime_ns
    replace_private(path, msgspec.json.format(msgspec.json.encode(run)))
    if written_ns:  # Its time is when the server was started.
        os.utime(path, ns=(written_ns, written_ns))


def read_run(folder: Path) -> Run:
    """Read `run.json`. Raises ConfigError if it is not there or not ours."""
    path = folder / RUN_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Run)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: not the run folder of a supervisor ({error}).") from error


def is_heard(path: Path) -> bool:
    """Whether somebody listens on a Unix socket; a killed process leaves its file behind."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except TimeoutError:
            return True  # Its queue is full: it may be stopped.
        except OSError:
            return False
        return True


def remove_stale_folders() -> None:
    """Remove the run folders, and with them the secrets, of supervisors and agents that were
    killed: those in which nobody listens any more.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        try:
            is_old = time.time() - (folder / RUN_FILE).stat().st_mtime > _YOUNG_S
            is_ours = folder.stat().st_uid == os.geteuid()
            if is_old and is_ours and not any(map(is_heard, folder.glob("*.sock"))):
                shutil.rmtree(folder)
        except OSError as error:  # None of a run's, or gone already.
            log.debug("%s stays: %s", folder, error)


def versions() -> dict[str, str]:
    """What this process runs on, by name."""
    return {
        "hadal": __version__,
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def new_epoch() -> str:
    """What tells this process from any other there was, on whatever host."""
    return f"{os.getpid()}-{secrets.token_hex(8)}"


def unit_arguments(description: str | None) -> argparse.Namespace:
    """The command line of a unit's process: unit, role, folder and, where there are several, rank
    and GPU.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--unit", required=True, help="the unit's name on the wire, such as decode-0"
    )
    parser.add_argument("--role", required=True, choices=ROLES)
    parser.add_argument("--rank", type=int, help="place in the unit, from 0; none: its leader")
    parser.add_argument("--device", type=int, help="which GPU of its node; none: the CPU")
    parser.add_argument("--model", default="", help="folder of the checkpoint; none: the run's")
    parser.add_argument("--model-digest", default="", help="of that folder's weights")
    parser.add_argument("--fingerprint", default="", help="of what KV made with them depends on")
    parser.add_argument("--messages", default="", help="digest of those that the server speaks")
    add_epoch_arguments(parser)
    return parser.parse_args()


def rollout_arguments(rollout: Rollout, messages: str) -> tuple[str, ...]:
    """What a unit's process is told that was started for a rollout."""
    words = {
        "--model": rollout.model,
        "--model-digest": rollout.model_digest,
        "--fingerprint": rollout.fingerprint,
        "--messages": messages,
    }
    return tuple(f"{name}={value}" for name, value in words.items() if value)


def messages_digest() -> str:
    """Of the fields of all messages. Processes that differ in it would misread each other."""
    schema = msgspec.json.encode(msgspec.json.schema(AnyMessage))
    return blake2b(schema, digest_size=16).hexdigest()


def enter_unit(name: str, asked: argparse.Namespace) -> Run:
    """First call of a unit's process: the run, with what it serves instead of what the server was
    started with. Raises ConfigError if this code cannot talk to the server's.
    """
    run = enter_child(name, asked.folder)
    if asked.messages and asked.messages != messages_digest():
        raise ConfigError(
            f"hadal {__version__}, which is installed now, does not understand the messages of the"
            " server that runs. Start a server with it beside this one, and end this one then."
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
    """What every process is told by whoever starts it."""
    parser.add_argument("--folder", type=Path, required=True, help="run folder of this host")
    parser.add_argument(
        "--epoch-number", type=int, default=0, help="how often a process of this name was started"
    )


def epoch_arguments(folder: Path, epoch_number: int) -> list[str]:
    """The same as words of a command line."""
    return ["--folder", str(folder), "--epoch-number", str(epoch_number)]


def enter_child(name: str, folder: Path) -> Run:
    """First call of a child process: read the run, set up its log."""
    faulthandler.enable()
    run = read_run(folder)
    raise_descriptor_limit()
    start_log(name, run.log_level, run.log_format)
    return run


def raise_descriptor_limit() -> None:
    """Be allowed MAX_DESCRIPTORS open files, or as many as may be had: a leader holds every segment
    of the disk cache open, and where the soft limit is the usual 1,024 it would run out at sixteen
    writers.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
