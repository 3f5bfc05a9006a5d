"""Running servers for tests: borrowed from a pool, or one of their own."""

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


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """All servers that tests of this process borrow."""
    servers = Pool()
    yield servers
    servers.close()


@contextmanager
def _lending(
    pool: Pool, give_back: Callable[[Pooled], None], *, is_mortal: bool = False
) -> Iterator[StartServer]:
    """What borrows from the pool; all of it is given back at the end of the block."""
    borrowed: list[Pooled] = []

    def take(*arguments: str, **overrides: Any) -> Server:
        borrowed.append(pool.borrow(arguments, overrides, is_mortal=is_mortal))
        return borrowed[-1].server

    yield take
    with contextlib.ExitStack() as stack:  # Each is audited, whatever becomes of the others.
        for one in borrowed:
            stack.callback(give_back, one)


@pytest.fixture
def borrow(pool: Pool) -> Iterator[StartServer]:
    """`borrow("--api-key", "k", decode={"drafts": 1})`: a server of this configuration that other
    tests have used, and will use. It is audited at the end of the test.
    """
    with _lending(pool, pool.give_back) as take:
        yield take


@pytest.fixture
def mortal(pool: Pool) -> Iterator[StartServer]:
    """Like `borrow`, for tests that end or freeze processes of a server that goes on: it is audited once
    all run again, and is lent to other such tests then.
    """
    with _lending(pool, pool.give_back, is_mortal=True) as take:
        yield take


@pytest.fixture
def ending(pool: Pool) -> Iterator[StartServer]:
    """Like `mortal`, for a test that ends its server: one that other tests have done with, or a new one."""
    with _lending(pool, pool.end, is_mortal=True) as take:
        yield take


@pytest.fixture
def server(borrow: StartServer) -> Server:
    """A server as it is by default, for a test that leaves it as it found it."""
    return borrow()


@pytest.fixture
def ranked(borrow: StartServer) -> Server:
    """Like `server`, with units of many ranks."""
    return borrow(**RANKED)
