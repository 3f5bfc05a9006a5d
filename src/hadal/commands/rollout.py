"""`hadal rollout`: make a running server replace its units, one after the other.

Checks that the new model fits the server's gateways, blocks and memory plan, and sends the rollout
to the supervisor, which writes its progress to `status.json`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import typer
from rich.console import Console

from hadal.commands.status import Found, find, wrong
from hadal.core.errors import ConfigError
from hadal.core.messages.base import SUPERVISOR
from hadal.core.messages.fleet import Rollout
from hadal.progress import Bar
from hadal.runtime.process.process import read_run
from hadal.runtime.process.status import RolloutStatus, read_status
from hadal.runtime.resolve import TOKENIZERS, model_folder, plan, with_digests
from hadal.runtime.wire import ZmqWire

EXIT_STOPPED = 1
"""Exit code if a new unit does not start: the remaining old units continue unreplaced."""
_OF_THE_GATEWAY = (*TOKENIZERS, "tokenizer_config.json", "chat_template.jinja")
"""Files that gateways read at their start. They must not differ: a rollout restarts no gateways."""
_LOOK_S = 0.2
_HEARD_S = 10.0
"""Seconds within which the server must begin the rollout."""


def roll_out(run_folder: Path | None, model: str, *, is_waited: bool) -> int:
    """Run a rollout and return the command's exit code. Raises ConfigError if no server is found,
    if it cannot change to the model, or if the rollout does not begin or is replaced.
    """
    found = find(run_folder)
    message = _message(found.folder, model) if model else Rollout()
    before = found.status.rollout.number if found.status.rollout is not None else 0
    wire = ZmqWire(f"rollout-{os.getpid()}", found.folder)
    try:
        wire.send(SUPERVISOR, message)
    finally:
        wire.close()
    begun = _begun(found, before)
    console = Console(stderr=True)
    console.print(
        f"Replacing {begun.num_units} units, one after the other, with units that serve"
        f" {begun.model}."
    )
    if not is_waited:
        return 0
    with Bar("units replaced", begun.num_units, console=console) as bar:
        for status in _statuses(found.folder, begun.number):
            bar.update(done=begun.num_units - status.num_left)
            if status.num_failed:
                break
        else:
            typer.echo(f"{begun.num_units} units are replaced.")
            return 0
    newest = read_status(found.folder)
    for reason in wrong(newest) if newest is not None else ():
        console.print(reason, markup=False)
    console.print(
        "A new unit does not become ready; `hadal logs` shows the reason. No other unit is"
        " replaced until it does. Fix the cause, or go back: hadal rollout --model FOLDER."
    )
    return EXIT_STOPPED


def _message(folder: Path, model: str) -> Rollout:
    """Check a model and return the message for the supervisor. Raises ConfigError."""
    run = read_run(folder)
    old, new = Path(run.deployment.model), model_folder(model)
    deployment = msgspec.structs.replace(run.deployment, model=str(new))
    before, after = plan(run.deployment), plan(deployment)
    for name in _OF_THE_GATEWAY:
        if _bytes_of(old / name) != _bytes_of(new / name):
            raise ConfigError(
                f"{new / name} differs from the file of this name in {old}. A rollout changes only weights;"
                " serve a model with another tokenizer or template separately."
            )
    if (before.config, before.precision) != (after.config, after.precision):
        raise ConfigError(
            f"{new}: its config.json or the type of its weights differs from that of"
            f" {old}. A rollout changes only weights; serve this model separately."
        )
    after = with_digests(after)
    return Rollout(str(new), after.model_digest, after.fingerprint)


def _bytes_of(path: Path) -> bytes | None:
    """Return a file's bytes; None if there is no such file. Raises ConfigError."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}).") from error


def _begun(found: Found, before: int) -> RolloutStatus:
    """Wait for a rollout with a number above `before`, and return its status. Raises ConfigError if
    none begins within _HEARD_S.
    """
    until_s = time.monotonic() + _HEARD_S
    while time.monotonic() < until_s:
        status = read_status(found.folder)
        if status is not None and status.rollout is not None and status.rollout.number > before:
            return status.rollout
        time.sleep(_LOOK_S)
    raise ConfigError(
        f"{found.status.url} did not begin the rollout within {_HEARD_S:g} s: the server"
        " is ending, or its version is too old for rollouts."
    )


def _statuses(folder: Path, number: int) -> Iterator[RolloutStatus]:
    """Yield the rollout's status until all units are replaced and up. Raises ConfigError if the
    server ends, or another rollout begins.
    """
    while True:
        status = read_status(folder)
        if status is None or status.rollout is None:
            raise ConfigError("the server has ended.")
        if status.rollout.number != number:
            raise ConfigError("another rollout has begun; it also replaces the units of this one.")
        yield status.rollout
        if not status.rollout.num_left:
            return
        time.sleep(_LOOK_S)
