"""A disk cache that is broken, foreign, full or gone: noticed, counted, computed again, and no
answer shows it.

Each time a server that keeps nothing in memory answers chats whose KV was written by another
server, or tries to write its own. Answers are the plain loop's, the server stays healthy and does
not fill its log.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hadal.core.cache import (
    DAMAGED_BLOCKS,
    DISK_EVICTED_BLOCKS,
    DISK_HIT_TOKENS,
    SKIPPED_BLOCKS,
    STORED_BLOCKS,
)
from hadal.model.checkpoint import load_weights
from hadal.runtime.process.process import EXIT_CONFIG
from hadal.runtime.resolve import model_folder
from tests.dist.cached import cache_fields, settle, wait_found
from tests.dist.chats import Chat, Named, everyday_chats, talk, with_kv, wrong
from tests.dist.conftest import starting
from tests.dist.oracle import FULL
from tests.dist.segments import cut_off, flip_bits, flip_records, names_on_disk, put_back, tables_of
from tests.dist.serving import STOP_TIMEOUT_S, Server, StartServer
from tests.fresh import fresh
from tests.levels import LEVEL
from tests.needs import leave_out

NUM_CHATS, NUM_TURNS = (30, 4) if FULL else (2, 2) if LEVEL == "test" else (5, 4)
NUM_OF_ANOTHER = 30 if FULL else 2
OTHER_FAULT = pytest.mark.more(
    "another fault; tests of the store have each, and one is in `make test`"
)
MAX_LOG_LINES = 6
"""Of the cache, in a server's life: one for what happened, from each of its processes."""
FAULTS: dict[str, Callable[[Path, random.Random], int]] = {"bits": flip_bits, "cut": cut_off}


@pytest.fixture(scope="module")
def chats() -> list[Chat]:
    return everyday_chats(NUM_CHATS, seed=41, num_turns=NUM_TURNS)


def write(start_server: StartServer, chats: list[Chat], cache: dict[str, Any]) -> None:
    """Let a server write the chats' KV and end."""
    server = start_server(**cache)
    assert wrong(chats, talk(server.url, server.model, chats)) == []
    assert settle(server)[STORED_BLOCKS] > 0
    assert server.stop() == 0


@pytest.fixture(scope="module")
def once_written(chats: list[Chat]) -> Iterator[Path]:
    """What a server left on disk that kept nothing in memory."""
    with tempfile.TemporaryDirectory(prefix="hadal-c-") as made, starting() as start:
        write(start, chats, cache_fields(Path(made), memory=False))
        yield Path(made)


@pytest.fixture
def written(once_written: Path, folder: Path) -> Path:
    """A copy of it, to be broken."""
    subprocess.run(
        ["cp", "-a", "--sparse=always", f"{once_written}/.", str(folder)], timeout=120, check=True
    )
    assert names_on_disk(folder) == names_on_disk(once_written)
    return folder


def check_serves(
    server: Server, chats: list[Chat], *, found_in: Path | None = None
) -> dict[str, int]:
    """Answers are right, twice, and everything is in order; returns the counts. `found_in`: the
    second time it can find what the first one wrote there.
    """
    for _ in range(2):
        assert wrong(chats, talk(server.url, server.model, chats)) == []
        seen = settle(server)
        if found_in is not None:
            wait_found(server, found_in)
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
    assert all(process.num_starts == 1 for process in server.status().processes.values()), (
        server.log()
    )
    return seen


def check_log(server: Server, what: str) -> None:
    """The cache's trouble is in the log, and not again and again."""
    lines = [line for line in server.log().splitlines() if "disk cache: " in line]
    assert lines, f"{what}, and no line of the log says so"
    assert len(lines) <= MAX_LOG_LINES, "\n".join(lines)
    assert "Traceback" not in server.log(), server.log()


@OTHER_FAULT
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS)
def test_damage(start_server: StartServer, chats: list[Chat], written: Path, fault: str) -> None:
    seed = fresh().randrange(2**31)
    print(f"seed {seed}")
    assert FAULTS[fault](written, random.Random(seed)) > 0
    server = start_server(**cache_fields(written, memory=False))
    wait_found(server, written)
    is_cut = fault == "cut"  # Such a segment is not even opened, and its blocks are written anew.
    seen = check_serves(server, chats, found_in=written if is_cut else None)
    check_log(server, fault)
    assert seen[STORED_BLOCKS] > 0
    # A damaged block is written anew once its writer has looked (unit/runtime/store/test_own).
    assert seen[DISK_HIT_TOKENS if is_cut else DAMAGED_BLOCKS] > 0


@OTHER_FAULT
@pytest.mark.timeout(600)
def test_a_damaged_table_is_a_miss(
    start_server: StartServer, chats: list[Chat], written: Path
) -> None:
    """A record that fails its own check names nothing: there is no block that could be damaged."""
    seed = fresh().randrange(2**31)
    print(f"seed {seed}")
    assert flip_records(written, random.Random(seed)) > 0
    assert names_on_disk(written) == set()
    server = start_server(**cache_fields(written, memory=False))
    seen = check_serves(server, chats, found_in=written)
    assert seen[STORED_BLOCKS] > 0
    assert seen[DISK_HIT_TOKENS] > 0


@OTHER_FAULT
@pytest.mark.slow("three servers, one after another")
@pytest.mark.timeout(600)
def test_a_stale_table(start_server: StartServer, chats: list[Chat], folder: Path) -> None:
    """A table of long ago speaks of blocks that were overwritten since: each is found out when it
    is read.
    """
    tight = cache_fields(folder, memory=False, disk_mb=1)
    half = len(chats) // 2
    write(start_server, chats[:half], tight)
    tables = tables_of(folder)
    write(start_server, chats[half:], tight)
    assert put_back(folder, tables) > 0, "nothing was overwritten; this test shows nothing"
    server = start_server(**tight)
    wait_found(server, folder)
    seen = check_serves(server, chats[:half])
    assert seen[DAMAGED_BLOCKS] > 0
    check_log(server, "a stale table")


@pytest.mark.timeout(600)
def test_damage_under_a_running_server(
    start_server: StartServer, chats: list[Chat], folder: Path
) -> None:
    """What it wrote itself and knows of is not believed either."""
    seed = fresh().randrange(2**31)
    print(f"seed {seed}")
    server = start_server(**cache_fields(folder, memory=False))
    assert wrong(chats, talk(server.url, server.model, chats)) == []
    settle(server)
    wait_found(server, folder)
    assert flip_bits(folder, random.Random(seed)) > 0
    assert check_serves(server, chats)[DAMAGED_BLOCKS] > 0
    check_log(server, "flipped bits")


@OTHER_FAULT
@pytest.mark.slow("four servers, of two models")
@pytest.mark.timeout(600)
def test_another_models_folder(
    start_server: StartServer, chats: list[Chat], written: Path, tmp_path: Path
) -> None:
    """KV of a model is never another's: nothing is hit that was not written by it. Both find their
    own afterwards.
    """
    other = tmp_path / "model"
    shutil.copytree(model_folder(""), other)
    config = other / "config.json"
    text = config.read_text(encoding="utf-8")
    assert '"rope_theta": 10000.0' in text
    config.write_text(
        text.replace('"rope_theta": 10000.0', '"rope_theta": 9000.0'), encoding="utf-8"
    )
    own = everyday_chats(NUM_OF_ANOTHER, seed=41, weights=load_weights(other))
    assert [chat[0].prompt for chat in own] == [chat[0].prompt for chat in chats[:NUM_OF_ANOTHER]]
    cache = cache_fields(written, memory=False)
    fields = {"model": str(other), **cache}
    server = start_server(**fields)
    named = Named()
    for chat in own:
        answers = talk(server.url, server.model, [chat])
        assert wrong([chat], answers) == []
        for case, answer in zip(chat, answers[0], strict=True):
            assert answer.hit <= named.hit(case.prompt), (
                "found what only the other model had computed"
            )
            named.add(with_kv(case))
    assert settle(server)[DAMAGED_BLOCKS] == 0
    assert server.stop() == 0
    for again, those in ((fields, own), (cache, chats)):
        server = start_server(**again)
        wait_found(server, written)
        assert wrong(those, talk(server.url, server.model, those)) == []
        assert settle(server)[DISK_HIT_TOKENS] > 0
        assert server.stop() == 0


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system that is full after a few blocks."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "hadal-test", str(folder)],
        capture_output=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        why = done.stderr.decode().strip()
        leave_out(f"no small file system can be mounted here ({why})", "sudo make test-more")
    yield folder
    # The server may still have files there: it is ended after this.
    subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, timeout=60, check=True)


@OTHER_FAULT
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_filled", [False, True], ids=["small", "filled"])
def test_a_full_disk(
    start_server: StartServer, chats: list[Chat], small_disk: Path, is_filled: bool
) -> None:
    if is_filled:  # Nothing fits at all.
        with (small_disk / "ballast").open("wb") as file:
            file.write(bytes(1000 * 1024))
    server = start_server(**cache_fields(small_disk, memory=False, disk_mb=64))
    seen = check_serves(server, chats)
    # The budget is far beyond the disk: what fits there is used, and made room in.
    assert seen[SKIPPED_BLOCKS if is_filled else DISK_EVICTED_BLOCKS] > 0
    check_log(server, "a full disk")


@OTHER_FAULT
@pytest.mark.timeout(600)
def test_the_folder_is_deleted_while_it_serves(
    start_server: StartServer, chats: list[Chat], folder: Path
) -> None:
    server = start_server(**cache_fields(folder, memory=False))
    assert wrong(chats, talk(server.url, server.model, chats)) == []
    settle(server)
    shutil.rmtree(folder)
    check_serves(server, chats)
    check_log(server, "the folder is gone")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert names_on_disk(folder), "what came next is kept in the folder that was made again"


@OTHER_FAULT
def test_a_folder_that_cannot_be_written(start_server: StartServer, folder: Path) -> None:
    """Below a file, so that it holds for root, too."""
    (folder / "file").write_text("no folder\n")
    server = start_server(**cache_fields(folder / "file" / "cache", memory=False), wait=False)
    assert server.process.wait(STOP_TIMEOUT_S) == EXIT_CONFIG
    assert (
        "cannot be used (Not a directory). Name a folder that you may write to in --cache-folder"
        in server.log()
    )
