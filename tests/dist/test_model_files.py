"""A model's files change under a server that has mapped them: truncated, replaced by another
model's, restored. A unit ends with a clear message, no answer is wrong, and the unit works again
once the files are restored.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from hadal.runtime.resolve import model_folder
from tests.dist.answers import asked, complete
from tests.dist.conftest import starting
from tests.dist.served import RETRY
from tests.dist.serving import Server
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.more("a process that sees its files change is in the unit tests")
NUM_TOKENS = 24
SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server that soon retries failed starts, and the folder of its model, which tests must restore."""
    folder = tmp_path_factory.mktemp("files") / "model"
    shutil.copytree(model_folder(""), folder)
    with starting() as start:
        # A cache's fingerprint would detect another model, so the server has no cache.
        yield (
            start(model=str(folder), cache={"memory": "off"}, environment={RETRY: "0.2"}),
            folder,
        )


def answer_is(server: Server, expected: str) -> bool:
    """Return whether a request gets the answer `expected`; False if it gets none. Raises
    AssertionError if it gets another answer.
    """
    body = asked(server, NUM_TOKENS)
    try:
        reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
    except httpx.HTTPError:
        return False
    if reply.status_code != 200:
        return False
    assert reply.json()["choices"][0]["text"] == expected, "answered with other weights"
    return True


def test_a_file_that_shrinks_ends_the_units_until_it_is_whole(served: tuple[Server, Path]) -> None:
    server, folder = served
    expected, whole = complete(server, NUM_TOKENS), (folder / SHARD).read_bytes()
    num_logged = len(server.log())
    os.truncate(folder / SHARD, len(whole) // 3)
    wait_until(
        lambda: re.search("changed while it was in use|SIGBUS", server.log()[num_logged:]),
        "a unit ends with a word about the file",
    )
    wait_until(lambda: "cannot start" in server.log()[num_logged:], "it cannot start")
    assert server.process.poll() is None, "the server stays"
    (folder / SHARD).write_bytes(whole)
    wait_until(lambda: answer_is(server, expected), "it works again")


def test_another_models_weights_are_refused(served: tuple[Server, Path]) -> None:
    """The file is replaced by a rename, like in a download: mapped weights stay unchanged."""
    server, folder = served
    expected = complete(server, NUM_TOKENS)
    whole = (folder / SHARD).read_bytes()
    other = bytearray(whole)
    begin = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:begin])
    at = next(e["data_offsets"][0] for e in header.values() if e.get("dtype") == "F8_E4M3")
    other[begin + at] ^= 0x10
    (folder / "new").write_bytes(other)
    (folder / "new").rename(folder / SHARD)
    wait_until(
        lambda: "have changed since this server was started" in server.log(),
        "the other weights are refused",
    )
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(answer_is, server, expected)  # Must not get the other weights' answer.
        (folder / "new").write_bytes(whole)
        (folder / "new").rename(folder / SHARD)
        wait_until(lambda: answer_is(server, expected), "it works again")
        early.result()
