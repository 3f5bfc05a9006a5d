"""Running servers for tests: one of their own, or one for a whole module."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.dist.serving import RANKED, Server, StartServer, finish, launch, wait_until

__all__ = ["Server", "StartServer", "starting", "wait_until"]


@contextmanager
def starting() -> Iterator[StartServer]:
    """What `start_server` yields; its servers end with the block."""
    servers: list[Server] = []
    folders: list[Path] = []

    def start(
        *arguments: str,
        wait: bool = True,
        environment: dict[str, str] | None = None,
        **overrides: Any,
    ) -> Server:
        folders.append(
            Path(tempfile.mkdtemp(prefix="hadal-t-"))
        )  # Sockets need a short path; tmp_path is a long one.
        server = launch(folders[-1], arguments, environment or {}, **overrides)
        servers.append(server)
        if wait:
            server.wait_ready()
        return server

    yield start
    try:
        for server in servers:
            finish(server)
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """`start_server("--api-key", "k", environment={}, decode={"kv_blocks": 9}, lease_s=5.0)`: a
    server that is ready.

    Positional: options of `hadal serve`. Keywords: fields of the deployment. `wait=False`: do not
    wait for it.
    """
    with starting() as start:
        yield start


@pytest.fixture
def folder() -> Iterator[Path]:
    """For a disk cache. Short-lived, and on a disk where the temporary folder is."""
    made = Path(tempfile.mkdtemp(prefix="hadal-c-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One server for a whole module, for tests that leave it as they found it."""
    with starting() as start:
        yield start()


@pytest.fixture(scope="module")
def ranked() -> Iterator[Server]:
    """The same with units of many ranks, for tests after which it is whole again."""
    with starting() as start:
        yield start(**RANKED)
