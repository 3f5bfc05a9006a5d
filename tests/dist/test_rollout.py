"""`hadal rollout` on a busy server: units are replaced one by one, and every answer is that of one
set of weights, the old or the new.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hadal.cli import app
from hadal.model.load import load_weights
from hadal.reference.forward import generate
from hadal.runtime.resolve import model_folder
from tests.dist.conftest import starting
from tests.dist.served import RETRY
from tests.dist.serving import Server, StartServer
from tests.waiting import PATIENCE_S, join, wait_until

PROMPTS = [tuple(range(first, first + 30)) for first in (300, 400, 500)]
NUM_TOKENS = 30
MORE_UNITS = pytest.mark.more("one unit is in `make test`")
Tokens = tuple[int, ...]


def ask(server: Server, prompt: Tokens) -> Tokens:
    body = {
        "model": "hadal-tiny",
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    return tuple(reply.json()["choices"][0]["token_ids"])


class Askers:
    """Clients that repeat a few prompts until the block ends; each prompt is answered at least once."""

    def __init__(self, server: Server) -> None:
        self.answers: list[tuple[Tokens, Tokens]] = []
        self.wrong: list[BaseException] = []
        self._server = server
        self._enough = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(p,), daemon=True) for p in PROMPTS
        ]

    def __enter__(self) -> Askers:
        for thread in self._threads:
            thread.start()
        wait_until(lambda: len(self.answers) >= len(PROMPTS), "all are answered once")
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        join(*self._threads)

    def check(self, *known: dict[Tokens, Tokens]) -> None:
        """Assert that no request failed and that each answer is a known one."""
        assert self.wrong == []
        strange = [(p, got) for p, got in self.answers if got not in [each[p] for each in known]]
        assert strange == []

    def _ask(self, prompt: Tokens) -> None:
        while not self._enough.is_set():
            try:
                self.answers.append((prompt, ask(self._server, prompt)))
            except BaseException as error:
                self.wrong.append(error)
                return


def ask_all(server: Server) -> dict[Tokens, Tokens]:
    return {prompt: ask(server, prompt) for prompt in PROMPTS}


def roll_out(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["rollout", "--run-folder", str(folder), *arguments])


def unit_pids(server: Server) -> dict[str, int]:
    return {name: pid for name, pid in server.pids().items() if name != "gateway"}


def other_weights(folder: Path) -> None:
    """Write a copy of the model that draws token n + 1 where this one draws n."""
    shutil.copytree(model_folder(""), folder)
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        for name in tensors:
            if name == "lm_head.weight":
                tensors[name] = tensors[name].roll(1, 0).contiguous()
        save_file(tensors, path, {"format": "pt"})


@pytest.fixture(scope="module")
def two_units() -> Iterator[Server]:
    """A server with two decode units; the last test ends it."""
    with starting() as start:
        yield start(decode={"units": 2}, environment={RETRY: "0.2"})


@pytest.mark.more("it is refused before a server is told")
def test_another_tokenizer_or_shape_is_refused(two_units: Server, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder(""), folder)
    config = folder / "config.json"
    whole = config.read_text()
    config.write_text(whole.replace('"rope_theta": ', '"rope_theta": 1'))
    done = roll_out(two_units.folder, "--model", str(folder))
    assert (done.exit_code, "config.json" in done.stderr) == (2, True), done.stderr
    config.write_text(whole)
    with (folder / "tokenizer.json").open("a") as file:
        file.write("\n")
    done = roll_out(two_units.folder, "--model", str(folder))
    assert (done.exit_code, "tokenizer.json differs" in done.stderr) == (2, True), done.stderr
    done = roll_out(two_units.folder, "--model", str(tmp_path / "none"))
    assert done.exit_code == 2, done.stderr
    done = roll_out(tmp_path)
    assert (done.exit_code, "no `hadal serve` runs there" in done.stderr) == (2, True)


@pytest.mark.promise(
    "If a new unit does not come up, the rollout ends there and the remaining old "
    "units go on: hadal rollout --model OLD restores the old weights."
)
@pytest.mark.more("unit tests of the fleet have rollouts that stop")
@pytest.mark.slow("units are replaced twice")
def test_what_does_not_come_up_stops_it_and_the_way_back_is_another_rollout(
    two_units: Server, tmp_path: Path
) -> None:
    folder, server = tmp_path / "model", two_units
    other_weights(folder)
    expected, num_units = ask_all(server), len(unit_pids(server))
    with Askers(server) as askers:
        assert roll_out(server.folder, "--no-wait", "--model", str(folder)).exit_code == 0
        for path in folder.glob("*.safetensors"):
            os.truncate(path, 100)
        wait_until(
            lambda: (status := server.status().rollout) is not None and status.num_failed >= 2,
            "it stops",
        )
        rolled = server.status().rollout
        assert rolled is not None
        assert rolled.num_left == num_units - 1
        done = roll_out(server.folder, "--model", str(model_folder("")))
        assert done.exit_code == 0, done.stderr
    askers.check(expected)


@pytest.mark.promise(
    "the units of the running server are replaced one by one, and no request fails"
)
@pytest.mark.parametrize(
    "kind",
    [
        "one unit",
        pytest.param("two units", marks=MORE_UNITS),
        pytest.param("a unit of two ranks", marks=MORE_UNITS),
    ],
)
@pytest.mark.slow("two units start anew, one after the other, with the code that is installed now")
def test_every_unit_is_replaced_and_no_request_fails(
    request: pytest.FixtureRequest, start_server: StartServer, tmp_path: Path, kind: str
) -> None:
    """One rollout to new weights; in all kinds but "one unit" also another one, which changes nothing.
    Each answer is completely the old model's or the new one's, and at the end all are the new one's.
    """
    folder = tmp_path / "model"
    other_weights(folder)
    torch.set_num_threads(1)  # Two threads would wait for each other on a busy machine.
    weights = load_weights(folder)
    new = {prompt: tuple(generate(weights, prompt, NUM_TOKENS, ())) for prompt in PROMPTS}
    if kind == "two units":
        server = request.getfixturevalue("two_units")
    else:
        server = start_server(decode={"ranks": 2} if kind == "a unit of two ranks" else {})
    old = ask_all(server)
    assert all(new[prompt] != old[prompt] for prompt in PROMPTS)
    before, gateway = unit_pids(server), server.pids()["gateway"]
    num_starts = {name: server.status().processes[name].num_starts for name in before}
    is_again = kind != "one unit"
    rollouts = [("--model", str(folder)), *([()] if is_again else [])]
    with Askers(server) as askers:
        for arguments in rollouts:
            done = roll_out(server.folder, *arguments)
            assert done.exit_code == 0, done.stderr
    askers.check(old, new)
    assert ask_all(server) == new
    after = unit_pids(server)
    assert all(after[name] not in (0, pid) for name, pid in before.items())
    assert server.pids()["gateway"] == gateway
    for name in before:
        assert server.status().processes[name].num_starts >= num_starts[name] + len(rollouts)
    # The successor of a unit or gateway that dies later serves the new weights, too.
    for name in ("decode-0", "prefill-0", "gateway") if is_again else ():
        pid = server.kill(name)
        server.wait_restarted(name, pid)
    assert ask_all(server) == new
    assert server.stop() == 0
