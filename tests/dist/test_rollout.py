"""`hadal rollout` on a server that is busy: units are replaced one by one, and every answer is what
one kind of weights gives, the old or the new.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from hadal.runtime.resolve import model_folder
from tests.dist.conftest import StartServer
from tests.dist.serving import Server
from tests.waiting import wait_until

PROMPTS = [f"What is {number} + 30?" for number in range(12, 18)]
NUM_TOKENS = 60
WATCHED_S = 120.0


def ask(server: Server, prompt: str) -> str:
    body = {
        "model": "hadal-tiny",
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=WATCHED_S)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


class Askers:
    """Clients that ask the same few things until the block ends."""

    def __init__(self, server: Server) -> None:
        self.answers: list[tuple[str, str]] = []
        self.wrong: list[BaseException] = []
        self._server = server
        self._enough = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(p,)) for p in PROMPTS]

    def __enter__(self) -> Askers:
        for thread in self._threads:
            thread.start()
        wait_until(lambda: len(self.answers) >= len(PROMPTS), "all are answered once")
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join(WATCHED_S)

    def _ask(self, prompt: str) -> None:
        while not self._enough.is_set():
            try:
                self.answers.append((prompt, ask(self._server, prompt)))
            except BaseException as error:
                self.wrong.append(error)
                return


def roll_out(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("hadal")), "rollout"]
    return subprocess.run(
        [*command, "--run-folder", str(server.folder), *arguments],
        capture_output=True,
        text=True,
        timeout=WATCHED_S,
        check=False,
    )


def unit_pids(server: Server) -> dict[str, int]:
    return {name: pid for name, pid in server.pids().items() if name != "gateway"}


def other_weights(folder: Path) -> None:
    """A copy of the model that says the next token where this one says one."""
    shutil.copytree(model_folder(""), folder)
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        for name in tensors:
            if name == "lm_head.weight":
                tensors[name] = tensors[name].roll(1, 0).contiguous()
        save_file(tensors, path, {"format": "pt"})


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "decode", [{"units": 2}, {"ranks": 2}], ids=["two units", "one unit of two ranks"]
)
def test_every_unit_is_replaced_and_no_request_fails(
    start_server: StartServer, decode: dict[str, Any]
) -> None:
    server = start_server(model=str(model_folder("")), decode=decode)
    expected = {prompt: ask(server, prompt) for prompt in PROMPTS}
    before, gateway = unit_pids(server), server.pids()["gateway"]
    with Askers(server) as askers:
        for _ in range(2):
            done = roll_out(server)
            assert done.returncode == 0, done.stderr
    assert askers.wrong == []
    assert [(prompt, text) for prompt, text in askers.answers if text != expected[prompt]] == []
    after = unit_pids(server)
    assert all(after[name] not in (0, pid) for name, pid in before.items())
    assert server.pids()["gateway"] == gateway
    for name in before:
        assert server.status().processes[name].num_starts == 3
    assert "it is killed" not in server.log()
    assert server.stop() == 0


def test_another_tokenizer_or_shape_is_refused(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server(model=str(model_folder("")))
    pids = server.pids()
    folder = tmp_path / "model"
    shutil.copytree(model_folder(""), folder)
    config = folder / "config.json"
    whole = config.read_text()
    config.write_text(whole.replace('"rope_theta": ', '"rope_theta": 1'))
    done = roll_out(server, "--model", str(folder))
    assert (done.returncode, "config.json" in done.stderr) == (2, True), done.stderr
    config.write_text(whole)
    with (folder / "tokenizer.json").open("a") as file:
        file.write("\n")
    done = roll_out(server, "--model", str(folder))
    assert (done.returncode, "tokenizer.json: differs" in done.stderr) == (2, True), done.stderr
    done = roll_out(server, "--model", str(tmp_path / "none"))
    assert done.returncode == 2, done.stderr
    assert server.pids() == pids
    server.stop()
    done = roll_out(server)
    assert (done.returncode, "no `hadal serve` runs there" in done.stderr) == (2, True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "decode", [{"units": 2}, {"ranks": 2}], ids=["two units", "one of two ranks"]
)
def test_new_weights_come_unit_by_unit(
    start_server: StartServer, tmp_path: Path, decode: dict[str, Any]
) -> None:
    """Each answer is the old model's or the new one's, whole; at the end all are the new one's."""
    folder = tmp_path / "model"
    other_weights(folder)
    server = start_server(model=str(model_folder("")), decode=decode)
    old = {prompt: ask(server, prompt) for prompt in PROMPTS}
    with Askers(server) as askers:
        done = roll_out(server, "--model", str(folder))
        assert done.returncode == 0, done.stderr
    assert askers.wrong == []
    new = {prompt: ask(server, prompt) for prompt in PROMPTS}
    assert all(new[prompt] != old[prompt] for prompt in PROMPTS)
    strange = [(p, text) for p, text in askers.answers if text not in (old[p], new[p])]
    assert strange == []
    again = start_server(model=str(folder), model_name="hadal-tiny", decode=decode)
    assert {prompt: ask(again, prompt) for prompt in PROMPTS} == new, "what a server of them says"
    # A process that dies later serves the new ones, too; so does a gateway.
    for name in ("decode-0", "prefill-0", "gateway"):
        pid = server.kill(name)
        server.wait_restarted(name, pid)
    assert {prompt: ask(server, prompt) for prompt in PROMPTS} == new


@pytest.mark.timeout(300)
def test_what_does_not_come_up_stops_it_and_the_way_back_is_another_rollout(
    start_server: StartServer, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    other_weights(folder)
    server = start_server(model=str(model_folder("")), decode={"units": 3})
    expected = {prompt: ask(server, prompt) for prompt in PROMPTS}
    with Askers(server) as askers:
        assert roll_out(server, "--no-wait", "--model", str(folder)).returncode == 0
        for path in folder.glob("*.safetensors"):
            os.truncate(path, 100)
        wait_until(
            lambda: (status := server.status().rollout) is not None and status.num_failed >= 2,
            "it stops",
        )
        rolled = server.status().rollout
        assert rolled is not None
        assert rolled.num_left == 3
        done = roll_out(server, "--model", str(model_folder("")))
        assert done.returncode == 0, done.stderr
    assert askers.wrong == []
    assert {text for p, text in askers.answers if text != expected[p]} == set()
