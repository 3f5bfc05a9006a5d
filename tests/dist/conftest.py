"""Running servers for tests: borrowed from a pool, or a test's own."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.dist.pool import Pool, Pooled
from tests.dist.serving import RANKED, Server, StartServer, finish, launch

__all__ = ["Server", "StartServer", "starting"]


@contextmanager
def starting() -> Iterator[StartServer]:
    """Yield the function behind `start_server`; its servers end with the block."""
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
        )  # Sockets need a short path; tmp_path is too long.
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
    """Yield a function that starts a server of its own and waits until it is ready.

    `start_server("--api-key", "k", environment={}, decode={"kv_blocks": 9}, lease_s=5.0)`.
    Positional: options of `hadal serve`. Keywords: fields of the deployment. `wait=False`: return
    before it is ready.
    """
    with starting() as start:
        yield start


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder for a disk cache, on the temporary folder's disk and deleted after the test."""
    made = Path(tempfile.mkdtemp(prefix="hadal-c-"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Yield the pool of servers that the tests of this process borrow."""
    servers = Pool()
    yield servers
    servers.close()


@contextmanager
def _lending(
    pool: Pool, give_back: Callable[[Pooled], None], *, is_mortal: bool = False
) -> Iterator[StartServer]:
    """Yield a function that borrows from the pool; all servers are given back at the end of the block."""
    borrowed: list[Pooled] = []

    def take(*arguments: str, **overrides: Any) -> Server:
        borrowed.append(pool.borrow(arguments, overrides, is_mortal=is_mortal))
        return borrowed[-1].server

    yield take
    with contextlib.ExitStack() as stack:  # Audits each server, even if another one's audit fails.
        for one in borrowed:
            stack.callback(give_back, one)


@pytest.fixture
def borrow(pool: Pool) -> Iterator[StartServer]:
    """Yield a function that lends a server shared with other tests, audited at the end of the test.

    Example: `borrow("--api-key", "k", decode={"drafts": 1})`.
    """
    with _lending(pool, pool.give_back) as take:
        yield take


@pytest.fixture
def mortal(pool: Pool) -> Iterator[StartServer]:
    """Yield a function that lends a server for tests that end or freeze some of its processes. The
    server is audited once all its processes run again, then lent to other such tests.
    """
    with _lending(pool, pool.give_back, is_mortal=True) as take:
        yield take


@pytest.fixture
def ending(pool: Pool) -> Iterator[StartServer]:
    """Yield a function that lends a server that the test ends: an idle one of the pool, or a new one."""
    with _lending(pool, pool.end, is_mortal=True) as take:
        yield take


@pytest.fixture
def server(borrow: StartServer) -> Server:
    """Return a server with the default configuration, for a test that leaves it unchanged."""
    return borrow()


@pytest.fixture
def ranked(borrow: StartServer) -> Server:
    """Return a shared server with several ranks per unit, for a test that leaves it unchanged."""
    return borrow(**RANKED)
