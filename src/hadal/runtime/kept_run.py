"""Record of a run that Ray keeps under a name. A new supervisor finds it and compares it with the
deployment that it should serve.

Starts nothing: runtime/supervisor/adoption takes over the processes on the nodes.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys

import msgspec

from hadal.core.config import ClusterConfig, Deployment
from hadal.core.errors import ConfigError
from hadal.runtime.agent import Joining

log = logging.getLogger("hadal.nodes")

_CONNECT_S = 5.0
"""Time limit for finding out whether a port of a host is open."""
_FIND_S = 60.0
"""Time limit for Ray to return the record of a run."""


def kept_run(cluster: ClusterConfig) -> Joining | None:
    """Return Ray's record of the last run under `cluster.name`: its supervisor and its processes'
    settings. None: the run ended in order, or there was none. Raises ConfigError if Ray does not
    answer, or if the run's supervisor still serves.
    """
    command = ["-m", "hadal.runtime.ray_cluster", "--find", cluster.name]
    try:
        asked = subprocess.run(
            [sys.executable, "-P", *command, "--address", cluster.address],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_FIND_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"Ray at {cluster.address!r} did not answer in {_FIND_S:g} s.") from error
    if asked.returncode:
        said = asked.stderr.decode(errors="replace").strip().splitlines()
        raise ConfigError(said[-1] if said else f"Ray at {cluster.address!r} does not answer.")
    if not asked.stdout:
        return None
    kept = msgspec.json.decode(asked.stdout, type=Joining)
    if is_open(kept.supervisor.endpoint):
        raise ConfigError(
            f"cluster.name {cluster.name!r} is in use by another `hadal serve`, on {kept.run.address}."
            " Stop that one first, or set another cluster.name here."
        )
    return kept


_MAY_DIFFER = ("model", "model_name", "prefill.threads", "decode.threads")
"""Fields that may differ: a rollout changes the first two, a host's cores determine the others."""


def is_same(found: Deployment, asked: Deployment) -> bool:
    """Return whether two deployments are equal except for _MAY_DIFFER. Log the differences."""
    differences = [name for name in _differences(found, asked) if name not in _MAY_DIFFER]
    if differences:
        log.warning(
            "ending the processes on the nodes: their settings differ (%s)",
            ", ".join(differences),
        )
    elif found.model != asked.model:
        log.warning(
            "the nodes still serve %s; `hadal rollout --model %s` changes to the requested model",
            found.model,
            asked.model,
        )
    return not differences


def _differences(one: msgspec.Struct, other: msgspec.Struct, path: str = "") -> list[str]:
    """Return the dotted names of the fields that differ."""
    names = []
    for name in one.__struct_fields__:
        mine, theirs = getattr(one, name), getattr(other, name)
        if isinstance(mine, msgspec.Struct) and isinstance(theirs, msgspec.Struct):
            names += _differences(mine, theirs, f"{path}{name}.")
        elif mine != theirs:
            names.append(path + name)
    return names


def is_open(endpoint: str) -> bool | None:
    """Return whether a process listens at "tcp://HOST:PORT"; None if the host does not answer."""
    address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((address.strip("[]"), int(port)), _CONNECT_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True
