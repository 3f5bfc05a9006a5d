"""Behaviour of `hadal serve` when its processes die, hang or are asked to end: no request is lost,
and nothing is left behind.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hadal.runtime.process.process import RUN_FILE
from hadal.runtime.resolve import model_folder
from hadal.runtime.supervisor.draining import SAME_SIGNAL_S
from tests.dist.answers import asked, complete, under_way
from tests.dist.conftest import starting
from tests.dist.serving import RANKED, SOURCE, Server, StartServer, blocks_used
from tests.processes import is_alive
from tests.waiting import DEADLINE_S, PATIENCE_S, wait_until

NUM_TOKENS = 60


def wait_replaced(server: Server, name: str, old_pid: int) -> None:
    """Wait until the supervisor has noticed that the process ended."""
    wait_until(lambda: server.pids()[name] != old_pid, f"the end of {name} was noticed")


@pytest.mark.promise(
    "Each attempt on that unit goes to RETRYING, is prefilled elsewhere with the "
    "tokens already streamed, and its stream continues."
)
@pytest.mark.parametrize(
    "victim", ["decode-0", pytest.param("prefill-0", marks=pytest.mark.more("it has no stream"))]
)
def test_a_stream_goes_on_where_it_stopped_when_a_unit_is_killed(
    mortal: StartServer, victim: str
) -> None:
    server = mortal()
    undisturbed = complete(server, NUM_TOKENS)
    streams = under_way(server, "decode-0", NUM_TOKENS)
    old_pid = server.kill(victim)
    wait_replaced(server, victim, old_pid)
    server.gate.open()
    assert streams.join() == [undisturbed]
    server.wait_restarted(victim, old_pid)
    assert len(server.shared_pools()) == 2
    assert complete(server, NUM_TOKENS) == undisturbed


def test_requests_survive_the_prefill_unit_they_wait_for(mortal: StartServer) -> None:
    server = mortal()
    undisturbed = complete(server, 8)
    streams = under_way(server, "prefill-0", 8, number=4)
    assert not any(streams.texts)
    old_pid = server.kill("prefill-0")
    server.gate.open()
    assert streams.join() == [undisturbed] * 4
    server.wait_restarted("prefill-0", old_pid)


@pytest.mark.promise("The gateway is started again on the same listening socket")
@pytest.mark.promise(
    "Its first message (FrontUp, a new epoch) makes the leaders free all blocks and "
    "slots of the earlier front."
)
def test_a_killed_gateway_comes_back_and_connections_wait_for_it(mortal: StartServer) -> None:
    server = mortal()
    undisturbed = complete(server, NUM_TOKENS)
    address = httpx.URL(server.url)
    streams = under_way(server, "decode-0", NUM_TOKENS)
    old_pid = server.kill("gateway")
    with pytest.raises(httpx.TransportError):
        streams.join()
    server.gate.open()
    # No connection is refused during the restart.
    with socket.create_connection((address.host, address.port), timeout=DEADLINE_S):
        server.wait_restarted("gateway", old_pid)
    assert complete(server, NUM_TOKENS) == undisturbed
    wait_until(lambda: blocks_used(server) == 0, "what units held for lost streams is freed")


@pytest.mark.slow("12 streams go on after some seconds")
@pytest.mark.parametrize(
    "deployment",
    [{}, pytest.param(RANKED, marks=pytest.mark.more("units of many ranks; one case stays"))],
)
def test_streams_outlive_a_gateway_that_stands_still(
    mortal: StartServer, deployment: dict[str, Any]
) -> None:
    server = mortal(**deployment, gateway_timeout_s=100.0)
    undisturbed = complete(server, NUM_TOKENS)
    streams = under_way(server, "decode-0", NUM_TOKENS, number=12)
    pid = server.kill("gateway", signal.SIGSTOP)
    server.gate.open()
    time.sleep(3.0)  # Longer than the timeout after which others look for a new front.
    os.kill(pid, signal.SIGCONT)
    assert streams.join() == [undisturbed] * 12
    assert server.pids()["gateway"] == pid


@pytest.mark.more("gateways that are killed are replaced in `make test`")
def test_a_hung_gateway_is_replaced(mortal: StartServer) -> None:
    server = mortal(gateway_timeout_s=2.0)
    undisturbed = complete(server, 8)
    old_pid = server.kill("gateway", signal.SIGSTOP)
    wait_replaced(server, "gateway", old_pid)
    assert complete(server, 8) == undisturbed
    server.wait_restarted("gateway", old_pid)
    assert not is_alive(old_pid)
    assert f"gateway (pid {old_pid}) sent no heartbeat for" in server.log()


@pytest.mark.more("each of them dies alone in `make test`")
def test_requests_wait_for_a_gateway_and_a_unit_that_died_together(mortal: StartServer) -> None:
    server = mortal()
    undisturbed = complete(server, 8)
    old_gateway, old_unit = server.kill("gateway"), server.kill("decode-0")
    assert complete(server, 8) == undisturbed
    server.wait_restarted("gateway", old_gateway)
    server.wait_restarted("decode-0", old_unit)


@pytest.mark.more("a disk that is full is rare")
def test_a_status_that_cannot_be_written_ends_nothing(mortal: StartServer) -> None:
    """Imitates a full disk."""
    server = mortal()
    undisturbed = complete(server, 8)
    (server.folder / "status.json.new").mkdir()
    old_pid = server.kill("decode-0")
    assert complete(server, 8) == undisturbed
    assert "are out of date" in server.log()
    assert server.pids()["decode-0"] == old_pid
    (server.folder / "status.json.new").rmdir()
    other_pid = server.kill("prefill-0")
    server.wait_restarted("prefill-0", other_pid)
    server.wait_restarted("decode-0", old_pid)
    assert complete(server, 8) == undisturbed


@pytest.mark.more("tests of Watch have it in simulated time")
def test_a_stopped_supervisor_takes_nobody_for_hung_when_it_goes_on(mortal: StartServer) -> None:
    server = mortal(gateway_timeout_s=2.0)
    pids, num_bytes = server.pids(), len(server.log())
    server.process.send_signal(signal.SIGSTOP)
    time.sleep(3.0)  # Longer than its timeouts for gateways and units (2 s by default).
    server.process.send_signal(signal.SIGCONT)
    # When it has replaced one unit, it has judged all processes.
    server.kill("prefill-0")
    server.wait_restarted("prefill-0", pids["prefill-0"])
    left = {name: pid for name, pid in pids.items() if name != "prefill-0"}
    assert server.pids() | left == server.pids()
    assert "sent no heartbeat for" not in server.log()[num_bytes:]


@pytest.mark.promise(
    "A leader's heartbeat is missing for unit_timeout_s, or a step exceeds its deadline: "
    "the process is ended"
)
@pytest.mark.more("worlds have silent units in simulated time")
def test_a_silent_unit_is_killed_and_its_requests_go_on(mortal: StartServer) -> None:
    server = mortal()
    undisturbed = complete(server, NUM_TOKENS)
    time.sleep(2.0)  # Only a unit older than unit_timeout_s can count as silent.
    streams = under_way(server, "decode-0", NUM_TOKENS)
    old_pid = server.kill("decode-0", signal.SIGSTOP)
    server.gate.open()
    assert streams.join() == [undisturbed]
    server.wait_restarted("decode-0", old_pid)
    assert not is_alive(old_pid)


@pytest.fixture(scope="module")
def json_server() -> Iterator[Server]:
    with starting() as start:
        yield start("--log-format", "json")


@pytest.mark.more("it starts the command anew")
def test_two_servers_do_not_mix(mortal: StartServer, json_server: Server) -> None:
    first = mortal()
    assert first.url != json_server.url
    assert not set(first.shared_pools()) & set(json_server.shared_pools())
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(SOURCE))))
    taken = subprocess.run(
        [sys.executable, "-m", "hadal.cli", "serve", "--port", str(httpx.URL(first.url).port)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert taken.returncode == 2
    assert "is in use" in taken.stderr
    assert len(taken.stderr.splitlines()) == 1


@pytest.mark.promise(
    "Every reply has an X-Request-Id, and every request has a line in the log. "
    "--log-format json writes the log as JSON."
)
@pytest.mark.more("unit tests of the log have lines in both forms")
def test_every_line_of_a_json_log_is_an_object(json_server: Server) -> None:
    server = json_server
    reply = httpx.post(
        f"{server.url}/v1/completions",
        json=asked(server, 8),
        headers={"X-Request-Id": "mine-1"},
        timeout=DEADLINE_S,
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


@pytest.mark.promise(
    "Any child ends with the supervisor, even before the child has imported anything"
)
@pytest.mark.promise("the fork server removes its run folder and shared memory at once")
def test_an_answer_and_no_process_outlives_a_killed_supervisor(start_server: StartServer) -> None:
    """The server is started in a new interpreter, as a user does, which is slower than a fork."""
    server = start_server(is_plain=True)
    assert complete(server, NUM_TOKENS)
    pids = list(server.pids().values())
    pools = server.shared_pools()
    assert len(pools) == 2
    server.process.kill()
    server.process.wait(DEADLINE_S)
    wait_until(lambda: not any(is_alive(pid) for pid in pids), "every child is gone")
    # The fork server removes the rest, once the socket to its supervisor closes.
    wait_until(lambda: not server.shared_pools(), "its shared memory is gone")
    wait_until(lambda: not (server.folder / RUN_FILE).exists(), "its secret is gone")


@pytest.mark.promise("Running streams finish, new requests get 503, then everything ends.")
def test_sigterm_lets_streams_finish_and_takes_nothing_new(ending: StartServer) -> None:
    """SIGINT comes with SIGTERM, as when make forwards a signal that its group got: both count as one."""
    server = ending()
    undisturbed = complete(server, NUM_TOKENS)
    url, body = server.url, asked(server, 5)
    with httpx.Client(timeout=PATIENCE_S) as client:
        client.get(f"{url}/health")  # The connection is open before the drain.
        streams = under_way(server, "decode-0", NUM_TOKENS)
        for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
            server.process.send_signal(number)  # It gets both when it continues.
        wait_until(
            lambda: client.get(f"{url}/health").json()["status"] == "draining",
            "the gateway drains",
        )
        refused = client.post(f"{url}/v1/completions", json=body)
    server.gate.open()
    assert streams.join() == [undisturbed]
    assert refused.status_code == 503
    assert "Retry-After" in refused.headers
    assert server.process.wait(DEADLINE_S) == 0
    assert not (server.folder / RUN_FILE).exists(), "its secret is gone"


@pytest.mark.more("a drain that nothing cuts short is in `make test`")
def test_a_second_signal_ends_at_once(ending: StartServer) -> None:
    server = ending()
    pids = list(server.pids().values())
    streams = under_way(server, "decode-0", NUM_TOKENS)
    server.process.terminate()
    wait_until(lambda: server.status().draining, "it drains")
    time.sleep(2 * SAME_SIGNAL_S)
    server.process.terminate()
    with pytest.raises(httpx.TransportError):
        streams.join()
    assert server.process.wait(DEADLINE_S) == 128 + signal.SIGTERM
    wait_until(lambda: not any(is_alive(pid) for pid in pids), "every child is gone")


@pytest.mark.more("tests of the checkpoint's reader have damaged files")
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
    assert server.process.wait(DEADLINE_S) == 2
    assert damaged.name in server.log()
    assert "Traceback" not in server.log()


@pytest.mark.promise("Long operations report their progress on stderr.")
@pytest.mark.more("it waits 10 s for a line of the log")
@pytest.mark.slow("a start is told of every 10 s")
def test_a_start_that_compiles_kernels_says_so(start_server: StartServer, tmp_path: Path) -> None:
    """The compiler is slow and then fails; the second unit's compilation fails immediately. The waiting
    processes and the reason are logged every 10 s.
    """
    compiler = tmp_path / "slow-c++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\n'
        'while [ ! -e "$0.seen" ]; do sleep 0.1; done; echo no luck; exit 1\n'
    )
    compiler.chmod(0o755)
    environment = {"CXX": str(compiler), "HADAL_CACHE_DIR": str(tmp_path / "cache")}
    server = start_server(environment=environment, wait=False)
    told = re.compile(r"\d of 3 processes are ready; .*compiles the kernels for this machine")
    wait_until(lambda: told.search(server.log()), "what it waits for is told")
    compiler.with_name(f"{compiler.name}.seen").touch()
    server.wait_ready()
    assert "INFO    the kernels are being compiled for this machine" in server.log()
    assert "there are no CPU kernels, and every op runs in plain torch, slower" in server.log()
