"""Fixtures: the random models of this folder's tests, made once per session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hadal.model import mla
from tests.unit.model.checkpoints import CONFIGS, Peer, make_peer


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Peers(dict[str, Peer]):
    """Name -> random model, made on first access."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders

    def __missing__(self, name: str) -> Peer:
        self[name] = make_peer(name, self._folders.mktemp(name))
        return self[name]


@pytest.fixture(scope="session")
def peers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Peer]:
    """Return every random model; each is made once."""
    return Peers(tmp_path_factory)


@pytest.fixture(params=list(CONFIGS))
def peer(request: pytest.FixtureRequest, peers: dict[str, Peer]) -> Peer:
    return peers[request.param]


@pytest.fixture(scope="module", params=["multi-head", "absorbed"])
def prefill_form(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each test that uses this fixture with both forms of attention in prefill."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            mla, "absorbs_prefill", lambda config, cache_PLSD: request.param == "absorbed"
        )
        yield


@pytest.fixture
def plain(peers: dict[str, Peer]) -> Peer:
    return peers["plain"]


@pytest.fixture
def own_folder(plain: Peer, tmp_path: Path) -> Path:
    """Copy a checkpoint, so that a test may damage it."""
    for file in plain.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path
