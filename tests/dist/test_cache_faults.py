"""Faults of a disk cache: damaged, foreign, full or deleted. Each is noticed and counted, the KV is
recomputed, and no answer changes.

A server without a memory cache answers chats after it has written their KV or tried to. Answers
equal the plain loop's, and the server stays healthy and does not flood its log. Tests of the store
start on folders that are already damaged (tests/unit/runtime/store).
"""

from __future__ import annotations

import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from hadal.core.cache import (
    DAMAGED_BLOCKS,
    DISK_EVICTED_BLOCKS,
    DISK_HIT_TOKENS,
    MISS_TOKENS,
    STORED_BLOCKS,
)
from hadal.core.errors import EXIT_CONFIG
from hadal.model.load import load_weights
from hadal.runtime.resolve import model_folder
from tests.dist.cached import cache_fields, settle, wait_found
from tests.dist.chats import Chat, Named, everyday_chats, talk, with_kv, wrong
from tests.dist.conftest import starting
from tests.dist.oracle import FULL
from tests.dist.segments import cut_off, flip_bits, names_on_disk
from tests.dist.serving import Server, StartServer
from tests.fresh import fresh
from tests.levels import LEVEL
from tests.needs import leave_out
from tests.waiting import DEADLINE_S

NUM_CHATS, NUM_TURNS = (30, 4) if FULL else (2, 2) if LEVEL == "test" else (5, 4)
NUM_OF_ANOTHER = 30 if FULL else 2
OTHER_FAULT = pytest.mark.more(
    "another fault; tests of the store have each, and one is in `make test`"
)
MAX_LOG_LINES = 6
"""Maximum number of log lines for one problem of the cache: one from each process of a server."""


@dataclass(frozen=True)
class Keeper:
    """A server that caches KV only on disk."""

    server: Server
    folder: Path

    def find_all(self, chats: list[Chat]) -> dict[str, int]:
        """Have the server write the chats' KV and wait until all of it can be found; return the counts."""
        assert wrong(chats, talk(self.server.url, self.server.model, chats)) == []
        seen = settle(self.server)
        wait_found(self.server, self.folder)
        return seen

    def check_serves(self, chats: list[Chat]) -> dict[str, int]:
        """Assert that answers are right twice and that the server is healthy; return the counts."""
        for _ in range(2):
            assert wrong(chats, talk(self.server.url, self.server.model, chats)) == []
            seen = settle(self.server)
        assert httpx.get(f"{self.server.url}/health", timeout=DEADLINE_S).status_code == 200
        processes = self.server.status().processes.values()
        assert all(process.num_starts == 1 for process in processes), self.server.log()
        return seen

    def check_log(self, words: str = "") -> None:
        """Assert that the log has the cache's problem, with these words, in few lines."""
        log = self.server.log()
        lines = [line for line in log.splitlines() if "disk cache: " in line and words in line]
        assert lines, f"no line of the log says {words}"
        assert len(lines) <= MAX_LOG_LINES, "\n".join(lines)
        assert "Traceback" not in log, log


@pytest.fixture(scope="module")
def chats() -> list[Chat]:
    return everyday_chats(NUM_CHATS, seed=41, num_turns=NUM_TURNS)


@pytest.fixture(scope="module")
def keeper() -> Iterator[Keeper]:
    """One server for all faults of its folder."""
    with tempfile.TemporaryDirectory(prefix="hadal-c-") as made, starting() as start:
        folder = Path(made) / "cache"
        yield Keeper(start(**cache_fields(folder, memory=False)), folder)


@OTHER_FAULT
@pytest.mark.slow("a server of another model starts, and its plain loop answers first")
def test_another_models_folder(
    keeper: Keeper, start_server: StartServer, chats: list[Chat], tmp_path: Path
) -> None:
    """A model's KV is never used for another model; each model finds only its own."""
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
    before = keeper.find_all(chats)
    cache = cache_fields(keeper.folder, memory=False)
    stranger = Keeper(start_server(model=str(other), **cache), keeper.folder)
    named = Named()
    for chat in own:
        answers = talk(stranger.server.url, stranger.server.model, [chat])
        assert wrong([chat], answers) == []
        for case, answer in zip(chat, answers[0], strict=True):
            assert answer.hit <= named.hit(case.prompt), (
                "found what only the other model had computed"
            )
            named.add(with_kv(case))
    settle(stranger.server)
    wait_found(stranger.server, keeper.folder)
    for name, one, those, hit_before in (
        ("the stranger", stranger, own, 0),
        ("the first", keeper, chats, before[DISK_HIT_TOKENS]),
    ):
        seen = one.find_all(those)
        assert seen[DISK_HIT_TOKENS] > hit_before, name
    assert settle(stranger.server)[DAMAGED_BLOCKS] == 0
    assert settle(keeper.server)[DAMAGED_BLOCKS] == before[DAMAGED_BLOCKS]


def delete(folder: Path, rng: random.Random) -> int:
    """Delete the folder."""
    shutil.rmtree(folder)
    return 1


FAULTS: dict[str, tuple[Callable[[Path, random.Random], int], str, str]] = {
    "bits": (flip_bits, DAMAGED_BLOCKS, "computed again and then rewritten"),
    "deleted": (delete, STORED_BLOCKS, "is gone"),
    "cut": (cut_off, MISS_TOKENS, "computed"),
}
"""Fault -> (damaging function, count that rises, words in the log). A scan of the folder or a read
finds a truncated segment, whichever comes first; only a read counts it as damage.
"""


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=OTHER_FAULT if name != "bits" else ()) for name in FAULTS]
)
def test_damage_under_a_running_server(keeper: Keeper, chats: list[Chat], fault: str) -> None:
    """Blocks that the server wrote itself are checked too."""
    seed = fresh().randrange(2**31)
    print(f"seed {seed}")
    before = keeper.find_all(chats)
    assert before[STORED_BLOCKS] > 0
    strike, counted, words = FAULTS[fault]
    assert strike(keeper.folder, random.Random(seed)) > 0
    assert keeper.check_serves(chats)[counted] > before[counted]
    keeper.check_log(words)
    if fault == "deleted":
        assert keeper.folder.stat().st_mode & 0o777 == 0o700
        assert names_on_disk(keeper.folder), "what came next is kept in the folder made again"


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system that is full after a few blocks."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "hadal-test", str(folder)],
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if done.returncode:
        why = done.stderr.decode().strip()
        leave_out(f"no small file system can be mounted here ({why})", "sudo make test-more")
    yield folder
    # The server may still have files open: it ends after this fixture.
    subprocess.run(
        ["umount", "--lazy", str(folder)], capture_output=True, timeout=DEADLINE_S, check=True
    )


@OTHER_FAULT
def test_a_full_disk(start_server: StartServer, chats: list[Chat], small_disk: Path) -> None:
    server = start_server(**cache_fields(small_disk, memory=False, disk_mb=64))
    keeper = Keeper(server, small_disk)
    # The budget is far larger than the disk: the server uses what fits and evicts within it.
    assert keeper.check_serves(chats)[DISK_EVICTED_BLOCKS] > 0
    keeper.check_log()


@OTHER_FAULT
def test_a_folder_that_cannot_be_written(start_server: StartServer, folder: Path) -> None:
    """A file as parent makes the folder unwritable for root, too."""
    (folder / "file").write_text("no folder\n")
    server = start_server(**cache_fields(folder / "file" / "cache", memory=False), wait=False)
    assert server.process.wait(DEADLINE_S) == EXIT_CONFIG
    assert (
        "cannot be used (Not a directory). Name a folder that you may write to in --cache-folder"
        in server.log()
    )
