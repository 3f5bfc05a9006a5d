"""Start of `hadal serve`, from its options to a running supervisor: the run folder, the secret, the
listening sockets, and processes that another supervisor left on the nodes.

Watches no processes: the supervisor does (runtime/supervisor).
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hadal.core.balance import OFF
from hadal.core.config import Deployment
from hadal.core.errors import ConfigError
from hadal.core.handshake import MIN_SECRET_BYTES, SECRET_BYTES
from hadal.core.messages.base import SUPERVISOR
from hadal.runtime.agent import Joining
from hadal.runtime.kept_run import is_same, kept_run
from hadal.runtime.listener import open_listener, url_of
from hadal.runtime.nodes import address_here
from hadal.runtime.process.forks import Forks
from hadal.runtime.process.logs import LOGS_FOLDER
from hadal.runtime.process.private import make_private, read_private
from hadal.runtime.process.process import (
    FOLDER_PREFIX,
    RUN_FILE,
    Run,
    is_listening,
    raise_descriptor_limit,
    remove_stale_folders,
)
from hadal.runtime.process.signals import signal_pipe
from hadal.runtime.resolve import Resolved
from hadal.runtime.supervisor.options import Listeners, Options
from hadal.runtime.supervisor.readiness import Announce
from hadal.runtime.supervisor.supervisor import Supervisor
from hadal.runtime.transfer.pool import remove_stale_shared_memory

log = logging.getLogger("hadal.supervisor")

_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def serve(
    resolved: Resolved,
    options: Options,
    announce: Announce,
    forks: Forks,
) -> int:
    """Serve until a signal or failure. Return the exit code. Raises ConfigError if the start fails.

    `forks` was started before, so that it imports torch while the deployment is read.
    """
    raise_descriptor_limit()
    for name in remove_stale_shared_memory():
        log.info("removed %s, left by an earlier run", name)
    remove_stale_folders()
    host, port = resolved.deployment.host, resolved.deployment.port
    with (
        open_listener(host, port) as listener,
        _console_listener(resolved.deployment) as pages,
        _run_folder(options.run_folder) as folder,
        signal_pipe(_SIGNALS) as fd,
    ):
        run, adopted = _run(resolved, options)
        pages_url = url_of(pages, run.deployment.host) if pages is not None else ""
        listeners = Listeners(listener, url_of(listener, host), pages, pages_url)
        supervisor = Supervisor(run, adopted, options, folder, listeners, announce, forks)
        try:
            return supervisor.run(fd)
        finally:
            supervisor.close()


def _run(resolved: Resolved, options: Options) -> tuple[Run, Joining | None]:
    """Return a new run, or the run that an earlier supervisor left on the nodes together with its
    record (Joining). Raises ConfigError.
    """
    deployment = resolved.deployment
    address = address_here(deployment.cluster)
    secret = _secret(options.secret_file)
    run = Run(
        secrets.token_hex(4),
        deployment,
        options.log_level,
        options.log_format,
        resolved.fingerprint,
        resolved.model_digest,
        address,
        secret,
    )
    kept = kept_run(deployment.cluster) if deployment.cluster.spans_hosts else None
    if kept is None:
        return run, None
    term = kept.run.term + 1
    is_ours = options.secret_file is None or kept.run.secret == secret
    if not is_ours or not is_same(kept.run.deployment, deployment):
        return dataclasses.replace(run, term=term), None
    log.info("taking over the processes that another supervisor left on the nodes")
    taken_over = dataclasses.replace(
        kept.run,
        log_level=run.log_level,
        log_format=run.log_format,
        address=address,
        term=term,
    )
    return taken_over, kept


@contextmanager
def _console_listener(deployment: Deployment) -> Iterator[socket.socket | None]:
    """Yield the listening socket for the pages; None if they are off. If the port cannot be opened,
    another one is taken, so that the server starts.
    """
    if deployment.console.mode == OFF:
        yield None
        return
    host, port = deployment.host, deployment.console.port
    try:
        listener = open_listener(host, port)
    except ConfigError:
        listener = open_listener(host, 0)
        log.warning("port %d is in use; the console is at %s", port, url_of(listener, host))
    with listener:
        yield listener


def _secret(path: Path | None) -> bytes:
    """Return the deployment's secret, from its file or random. Raises ConfigError."""
    if path is None:
        return secrets.token_bytes(SECRET_BYTES)
    found = read_private(path, "the secret")
    if len(found) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"{path}: the secret is too short; it needs at least {MIN_SECRET_BYTES} bytes."
        )
    return found


def _clear_run(folder: Path) -> None:
    """Remove a run's sockets and its secrets: run.json has the secret and may have the ledger's
    password. status.json and the logs stay.
    """
    for left in (*folder.glob("*.sock"), *folder.glob(RUN_FILE)):
        left.unlink()


@contextmanager
def _run_folder(asked: Path | None) -> Iterator[Path]:
    """Yield the run folder, private to this user. Afterwards remove at least its secrets."""
    if asked is not None:
        make_private(asked)
        if is_listening(asked / f"{SUPERVISOR}.sock"):
            raise ConfigError(f"{asked}: another `hadal serve` uses this run folder. Name another.")
        _clear_run(asked)
        shutil.rmtree(asked / LOGS_FOLDER, ignore_errors=True)
        folder = asked.absolute()
        try:
            yield folder
        finally:
            with suppress(OSError):
                _clear_run(folder)
        return
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
