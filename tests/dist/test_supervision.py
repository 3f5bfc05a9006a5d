"""What `hadal serve` does when its processes die, hang, or are asked to end: no request lost,
nothing left behind.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hadal.runtime.launch import SAME_SIGNAL_S
from hadal.runtime.resolve import model_folder
from hadal.runtime.transfer.pool import remove_stale_shared_memory
from tests.dist.serving import STOP_TIMEOUT_S, Server, StartServer, is_alive
from tests.waiting import wait_until

PROMPT = list(range(10, 130))
"""Token ids: two blocks of KV, whatever the tokenizer."""


def body(num_tokens: int, **fields: Any) -> dict[str, Any]:
    return {
        "prompt": PROMPT,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


def complete(server: Server, num_tokens: int) -> str:
    """A greedy completion in one piece."""
    reply = httpx.post(
        f"{server.url}/v1/completions", json=body(num_tokens, model=server.model), timeout=60
    )
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["completion_tokens"] == num_tokens
    return str(reply.json()["choices"][0]["text"])


def stream(
    server: Server, num_tokens: int, model: str, client: httpx.Client | None = None
) -> Iterator[str]:
    """The same, piece by piece."""
    fields = body(num_tokens, model=model, stream=True)
    with (client or httpx).stream(
        "POST", f"{server.url}/v1/completions", json=fields, timeout=60
    ) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    yield choice["text"]


def act_midway(server: Server, num_tokens: int, act: Callable[[], object]) -> None:
    """Stream a completion, and do something after a few pieces."""
    for index, _ in enumerate(stream(server, num_tokens, server.model)):
        if index == 5:
            act()


@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
def test_a_stream_goes_on_where_it_stopped_when_a_unit_is_killed(
    server: Server, victim: str
) -> None:
    undisturbed = complete(server, 300)
    pieces: list[str] = []
    old_pid = 0
    for piece in stream(server, 300, server.model):
        pieces.append(piece)
        if len(pieces) == 10:
            old_pid = server.kill(victim)
            wait_until(lambda gone=old_pid: server.pids()[victim] != gone, "its end was noticed")
    assert "".join(pieces) == undisturbed
    server.wait_restarted(victim, old_pid)
    assert len(server.shared_pools()) == 2
    assert complete(server, 300) == undisturbed


def test_requests_survive_the_prefill_unit_they_wait_for(server: Server) -> None:
    undisturbed = complete(server, 8)
    old_pid = server.kill("prefill-0", signal.SIGSTOP)
    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda: answers.append(complete(server, 8))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.5)  # They are in its queue; if not all are, the test is only easier.
    assert answers == []
    os.kill(old_pid, signal.SIGKILL)
    for thread in threads:
        thread.join(60)
    assert answers == [undisturbed] * 4
    server.wait_restarted("prefill-0", old_pid)


def test_a_killed_gateway_comes_back_and_connections_wait_for_it(server: Server) -> None:
    undisturbed = complete(server, 100)
    address = httpx.URL(server.url)
    old_pid = server.pids()["gateway"]
    with pytest.raises(httpx.TransportError):
        act_midway(server, 3000, lambda: server.kill("gateway"))
    # Nobody is refused meanwhile.
    with socket.create_connection((address.host, address.port), timeout=5):
        server.wait_restarted("gateway", old_pid)
    assert complete(server, 100) == undisturbed
    # What the units held for streams that are gone is freed.
    wait_until(lambda: _blocks_used(server) == [0.0, 0.0], "all blocks are free")


def test_a_hung_gateway_is_replaced(server: Server) -> None:
    undisturbed = complete(server, 8)
    old_pid = server.kill("gateway", signal.SIGSTOP)
    wait_until(lambda: server.pids()["gateway"] != old_pid, "that it hangs was noticed")
    assert complete(server, 8) == undisturbed
    server.wait_restarted("gateway", old_pid)
    assert not is_alive(old_pid)
    assert f"gateway (pid {old_pid}) has not moved for" in server.log()


def test_requests_wait_for_a_gateway_and_a_unit_that_died_together(server: Server) -> None:
    undisturbed = complete(server, 8)
    old_gateway, old_unit = server.kill("gateway"), server.kill("decode-0")
    assert complete(server, 8) == undisturbed
    server.wait_restarted("gateway", old_gateway)
    server.wait_restarted("decode-0", old_unit)


def test_a_status_that_cannot_be_written_ends_nothing(server: Server) -> None:
    """As on a disk that is full."""
    undisturbed = complete(server, 8)
    (server.folder / "status.json.new").mkdir()
    old_pid = server.kill("decode-0")
    assert complete(server, 8) == undisturbed
    assert "what is told in" in server.log()
    assert server.pids()["decode-0"] == old_pid
    (server.folder / "status.json.new").rmdir()
    other_pid = server.kill("prefill-0")
    server.wait_restarted("prefill-0", other_pid)
    server.wait_restarted("decode-0", old_pid)
    assert complete(server, 8) == undisturbed


def test_a_stopped_supervisor_takes_nobody_for_hung_when_it_goes_on(server: Server) -> None:
    pids = server.pids()
    server.process.send_signal(signal.SIGSTOP)
    time.sleep(3.0)
    server.process.send_signal(signal.SIGCONT)
    time.sleep(1.0)
    assert server.pids() == pids


def test_a_silent_unit_is_killed_and_its_requests_go_on(start_server: StartServer) -> None:
    server = start_server(unit_timeout_s=1.25, rank_timeout_s=1.0, heartbeat_s=0.1)
    undisturbed = complete(server, 150)
    # It must have lived longer than the timeout to be taken for silent.
    time.sleep(1.5)
    pieces: list[str] = []
    for piece in stream(server, 150, server.model):
        pieces.append(piece)
        if len(pieces) == 5:
            old_pid = server.kill("decode-0", signal.SIGSTOP)
    assert "".join(pieces) == undisturbed
    server.wait_restarted("decode-0", old_pid)
    assert not is_alive(old_pid)


def fork_servers(server: Server) -> list[int]:
    """The process that its units were forked from, by its parent."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_one = b"hadal.runtime.process.forks" in (path / "cmdline").read_bytes()
            parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
            if (
                is_one
                and int(parent) == server.process.pid
                and int(path.name) not in server.pids().values()
            ):
                found.append(int(path.name))
    return found


def test_no_process_outlives_a_killed_supervisor(start_server: StartServer) -> None:
    server = start_server(is_plain=True)
    pids = list(server.pids().values())
    pools = server.shared_pools()
    assert len(pools) == 2
    server.process.kill()
    server.process.wait(5)
    wait_until(lambda: not any(is_alive(pid) for pid in pids), "every child is gone")
    # What it could not remove itself its fork server does, when the socket between them ends.
    wait_until(lambda: not server.shared_pools(), "its shared memory is gone")


def test_what_a_killed_server_leaves_goes_at_the_next_start(start_server: StartServer) -> None:
    server = start_server()
    pools = server.shared_pools()
    assert len(pools) == 2
    forks = fork_servers(server)
    assert len(forks) == 1
    pids = [*server.pids().values(), *forks]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    server.process.kill()
    server.process.wait(5)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    # A killed process counts as gone when its first thread is; the others may hold its lock a
    # moment longer.
    swept: set[str] = set()

    def all_swept() -> bool:
        swept.update(remove_stale_shared_memory())
        return set(pools) <= swept

    wait_until(all_swept, "all its pools are swept")
    assert server.shared_pools() == []


def test_sigterm_lets_streams_finish_and_takes_nothing_new(start_server: StartServer) -> None:
    server = start_server()
    undisturbed = complete(server, 800)
    model, url = server.model, server.url
    pieces: list[str] = []
    refused: list[httpx.Response] = []
    with httpx.Client(timeout=10) as client:
        client.get(f"{url}/health")  # A connection that is open already.
        for piece in stream(server, 800, model):
            pieces.append(piece)
            if len(pieces) == 5:
                server.process.terminate()
                # The gateway has to hear of it first.
                wait_until(
                    lambda: client.get(f"{url}/health").json()["status"] == "draining",
                    "it drains",
                )
            if len(pieces) == 6:
                refused.append(client.post(f"{url}/v1/completions", json=body(5, model=model)))
    assert "".join(pieces) == undisturbed
    assert [reply.status_code for reply in refused] == [503]
    assert "Retry-After" in refused[0].headers
    assert server.process.wait(STOP_TIMEOUT_S) == 0


def test_a_second_signal_ends_at_once(start_server: StartServer) -> None:
    server = start_server()
    pids = list(server.pids().values())

    def end_twice() -> None:
        server.process.terminate()
        wait_until(lambda: server.status().draining, "it drains")
        time.sleep(2 * SAME_SIGNAL_S)
        server.process.terminate()

    with pytest.raises(httpx.TransportError):
        act_midway(server, 3900, end_twice)
    assert server.process.wait(3) == 128 + signal.SIGTERM
    assert not any(is_alive(pid) for pid in pids)


def test_a_signal_that_comes_twice_is_one(start_server: StartServer) -> None:
    """As make passes on what its whole group was sent: the stream ends as after one."""
    server = start_server()

    def end_twice() -> None:
        server.process.terminate()
        time.sleep(SAME_SIGNAL_S / 10)
        server.process.terminate()

    act_midway(server, 600, end_twice)
    assert server.process.wait(30) == 0


def test_a_damaged_checkpoint_ends_it_with_the_files_name(
    start_server: StartServer, tmp_path: Path
) -> None:
    model = model_folder("")
    for path in model.iterdir():
        (tmp_path / path.name).symlink_to(path)
    damaged = sorted(tmp_path.glob("*.safetensors"))[-1]
    content = damaged.read_bytes()
    damaged.unlink()
    damaged.write_bytes(content[: len(content) // 2])
    server = start_server(wait=False, model=str(tmp_path))
    assert server.process.wait(60) == 2
    assert damaged.name in server.log()
    assert "Traceback" not in server.log()


def test_two_servers_do_not_mix(server: Server, start_server: StartServer) -> None:
    first, second = server, start_server(environment={"HADAL_API_KEYS": "secret"})
    assert first.url != second.url
    assert not set(first.shared_pools()) & set(second.shared_pools())
    assert httpx.get(f"{first.url}/v1/models").status_code == 200
    assert httpx.get(f"{second.url}/v1/models").status_code == 401
    taken = subprocess.run(
        [sys.executable, "-m", "hadal.cli", "serve", "--port", str(httpx.URL(first.url).port)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env={**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", "") + os.pathsep + _source()},
    )
    assert taken.returncode == 2
    assert "is in use" in taken.stderr
    assert len(taken.stderr.splitlines()) == 1


def _source() -> str:
    return str(Path(__file__).resolve().parents[2] / "src")


def _blocks_used(server: Server) -> list[float]:
    text = httpx.get(f"{server.url}/metrics", timeout=10).text
    return [
        float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith("hadal_kv_blocks_used{")
    ]


def test_every_line_of_a_json_log_is_an_object(start_server: StartServer) -> None:
    server = start_server("--log-format", "json")
    asked = body(8, model=server.model)
    reply = httpx.post(
        f"{server.url}/v1/completions", json=asked, headers={"X-Request-Id": "mine-1"}, timeout=60
    )
    assert reply.status_code == 200
    old_pid = server.kill("decode-0")
    server.wait_restarted("decode-0", old_pid)
    server.stop()
    lines = [json.loads(line) for line in server.log().splitlines()]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:]{8}\.\d{3}Z", line["time"]) for line in lines)
    assert {"supervisor", "gateway", "prefill-0", "decode-0"} <= {line["process"] for line in lines}
    (access,) = (line for line in lines if line.get("request_id") == "mine-1")
    assert (access["status"], access["reply_id"]) == (200, reply.json()["id"])
    (ended,) = (line for line in lines if line["message"] == "decode-0 ended: killed by SIGKILL")
    assert (ended["process"], ended["unit"], ended["level"]) == (
        "supervisor",
        "decode-0",
        "warning",
    )


def test_a_start_that_compiles_kernels_says_so(start_server: StartServer, tmp_path: Path) -> None:
    """A compiler that takes long, and then fails (the second unit's at once): what waits for it is
    told every 10 s, and what it means.
    """
    compiler = tmp_path / "slow-c++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\nmkdir "$0.tried" && sleep 11; echo no luck; exit 1\n'
    )
    compiler.chmod(0o755)
    environment = {"CXX": str(compiler), "HADAL_CACHE_DIR": str(tmp_path / "cache")}
    server = start_server(environment=environment, wait=False)
    server.wait_ready(150.0)
    log = server.log()
    assert "INFO    the kernels are being compiled for this machine" in log
    assert re.search(r"\d of 3 processes are ready; .*compiles the kernels for this machine", log)
    assert "there are no CPU kernels, and every op runs in plain torch, slower" in log
