"""The group of a rank: its exchanges with the other ranks of its unit, over the transport that the
deployment names.

Knows no model and no step.
"""

from __future__ import annotations

from pathlib import Path

from hadal.comm.mesh.mesh import PURPOSE as MESH_PURPOSE
from hadal.comm.mesh.mesh import MeshGroup
from hadal.comm.torch_group import TorchGroup
from hadal.core.errors import ConfigError
from hadal.core.handshake import key_of
from hadal.runtime.process.process import Run
from hadal.runtime.rank.news import News


def make_group(
    run: Run, rank: int, epoch: str, news: News, *, folder: Path, device: str = "cpu"
) -> MeshGroup | TorchGroup:
    """Get ready for the peers; `folder`: where the unit's ranks meet. Raises ConfigError if there
    is no such transport.

    The mesh tells `news` of a broken connection at once; torch's groups notice a peer only in an
    exchange with it, and an idle unit hears of its loss from the leader.
    """
    deployment, deadline_s = run.deployment, run.deployment.collective_timeout_s
    if deployment.transport == "tcp":
        key = key_of(run.secret, MESH_PURPOSE)
        return MeshGroup(
            rank, epoch, host=run.address, deadline_s=deadline_s, on_lost=news.peer_lost, key=key
        )
    try:
        return TorchGroup(
            rank,
            backend=deployment.transport,
            folder=folder,
            deadline_s=deadline_s,
            device=device,
            host=run.address,
        )
    except ValueError as error:
        raise ConfigError(f"transport {deployment.transport!r} cannot be had: {error}") from error
