"""An attacking process with another account of the same host, while the server answers requests.

The attacker has all public facts: every port (/proc/net/tcp), every name in shared memory, run,
ranks, epochs, generation, and the protocols. It lacks the secret. It must read nothing, be refused
on every connection, and disturb no request. If the tests are not run by root, it has their account.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.dist.conftest import starting
from tests.dist.keyed import header
from tests.dist.serving import Server, metric
from tests.fresh import fresh
from tests.levels import FULL
from tests.waiting import DEADLINE_S, PATIENCE_S, wait_until

NUM_ATTACKS = 10_000 if FULL else 150
KEY = "a-key-of-ours"

STRANGER = r"""
import encodings.idna, glob, hashlib, hmac, json, os, random, socket, struct, sys
asked = json.loads(sys.argv[1])
if os.geteuid() == 0:  # Only now: the interpreter may lie where nobody else may go.
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
rng = random.Random(asked["seed"])
found = {"opened": [], "ports": [], "attacks": 0, "most_bytes": 0, "kinds": {}}
for path in glob.glob("/dev/shm/hadal-*") + glob.glob(asked["folder"] + "/**") + [asked["folder"] + "/run.json"]:
    try:
        os.close(os.open(path, os.O_RDONLY))
        found["opened"].append(path)
    except OSError:
        pass
for line in open("/proc/net/tcp").read().splitlines()[1:]:
    where, state = line.split()[1], line.split()[3]
    port = int(where.split(":")[1], 16)
    if state == "0A" and port in asked["ports"] and where.startswith("0100007F"):  # Other servers are left in peace.
        found["ports"].append(port)
# What the key was made of before there was a secret, and keys that somebody may have left empty.
guesses = [bytes(32), b"", asked["run_id"].encode(), hashlib.blake2b(
    f"hadal kv 1 {asked['run_id']}".encode(), digest_size=16).digest(), rng.randbytes(32)]
magic, mesh = b"HADALP01", struct.Struct("<4sIIIQ")

def frame(kind, generation, body, sequence=0):
    return mesh.pack(b"HdM2", kind, generation, sequence, len(body)) + body

def proof(key, *parts):
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        mac.update(struct.pack("<Q", len(part)) + part)
    return mac.digest()

overheard = []  # What the server said to others of its connections, and what was said to it.
for number in range(asked["attacks"]):
    port = rng.choice(found["ports"])
    kind = rng.choice([
        "old kv", "old experts", "old mesh", "forged", "forged mesh", "replayed", "reflected", "altered", "noise",
    ])
    key, nonce = rng.choice(guesses), rng.randbytes(32)
    rank, to_rank = rng.randrange(2), rng.randrange(2)
    epochs = [rng.choice(asked["epochs"]) for _ in range(2)]
    generation = rng.choice([0, 1, 2, 3, 1 << 31])
    claim = f"{generation} {rank} {to_rank}\n{epochs[0]}\n{epochs[1]}".encode()
    hello = proof(key, b"connector", nonce, nonce, struct.pack("<Q", port), b"near", claim) + claim
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
            connection.settimeout(0.01)
            data = {
                "old kv": struct.pack("<8sH16s", b"HADALKVT", 1, guesses[3]),
                "old experts": struct.pack("<16sII", guesses[3], 0, 7),
                "old mesh": mesh.pack(b"HdM1", 1, 1, 0, 5) + b"0 1\na",
                "forged": magic + nonce,
                "forged mesh": frame(4, 0, nonce) + frame(1, generation, hello) + frame(3, 1, b"1\ngive up")
                    + frame(2, 1, b"12345"),
                "replayed": rng.choice(overheard or [b"x"]),
                "reflected": b"",
                "altered": bytes(byte ^ (rng.random() < 0.01) for byte in rng.choice(overheard or [b"x"])),
                "noise": rng.randbytes(rng.randrange(1, 5000)),
            }[kind]
            connection.sendall(data)
            got = b""
            try:
                while more := connection.recv(1 << 16):
                    got += more
                    if len(got) > 1 << 20:
                        break
                    if kind == "reflected":
                        connection.sendall(more)
                    elif kind == "forged" and len(got) == 72:
                        name = b"decode-0".ljust(128, b"\0")
                        last = name + proof(key, b"connector", nonce, got[8:40], struct.pack("<Q", port), b"near", name)
                        overheard.append(magic + nonce + last)
                        connection.sendall(last)
            except TimeoutError:
                pass
            if got:
                overheard.append(got)
            overheard.append(data)
            overheard = overheard[-200:]
            found["most_bytes"] = max(found["most_bytes"], len(got))
    except OSError:
        pass
    found["attacks"] += 1
    found["kinds"][kind] = found["kinds"].get(kind, 0) + 1
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def networked() -> Iterator[Server]:
    """A server with TCP between ranks and units, and a key in its environment."""
    with starting() as start:
        yield start(
            transport="tcp",
            handover="tcp",
            # No rank may count as lost because a busy machine delays its heartbeats.
            rank_timeout_s=30.0,
            collective_timeout_s=PATIENCE_S,
            unit_timeout_s=60.0,
            decode={"ranks": 2},
            environment={"HADAL_API_KEYS": KEY},
        )


def ask(server: Server, number: int) -> str:
    reply = httpx.post(
        f"{server.url}/v1/chat/completions",
        timeout=DEADLINE_S,
        headers=header(KEY),
        json={
            "model": "hadal-tiny",
            "temperature": 0,
            "max_tokens": 60,
            "messages": [{"role": "user", "content": f"What is {number} + 30?"}],
        },
    )
    assert reply.status_code == 200, reply.text
    message = reply.json()["choices"][0]["message"]
    return f"{message.get('reasoning_content')}|{message['content']}"


def num_refused(server: Server) -> float:
    """Return the number of refused connections; 0 while the metric is missing, before the first one."""
    with suppress(AssertionError):
        return metric(server, "hadal_refused_connections_total", key=KEY)
    return 0.0


def as_stranger(server: Server, **asked: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-I", "-c", STRANGER, json.dumps(asked)],
        cwd="/",
        env={},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.more("handshakes that are refused are in the unit tests")
@pytest.mark.slow("each attack waits a moment for an answer")
def test_a_stranger_reads_nothing_and_disturbs_nobody(networked: Server) -> None:
    seed = fresh().randrange(2**31)
    print(f"seed {seed}")
    server = networked
    wanted = [ask(server, number) for number in range(10, 14)]
    pids, num_formed = server.pids(), server.log().count(" done in ")
    names = [name.removeprefix("hadal-") for name in server.shared_pools()]
    ports = [port for name, pid in pids.items() if name != "gateway" for port in listening({pid})]
    stranger = as_stranger(
        server,
        seed=seed,
        attacks=NUM_ATTACKS,
        folder=str(server.folder),
        ports=ports,
        run_id=server.status().run_id,
        epochs=[name.rpartition(".")[2] for name in names],
    )
    try:
        num_answered = 0
        while stranger.poll() is None:
            assert [ask(server, number) for number in range(10, 14)] == wanted
            num_answered += 4
        out, err = stranger.communicate(timeout=DEADLINE_S)
    finally:
        stranger.kill()
    assert stranger.returncode == 0, err
    found = json.loads(out)
    num_ports = len(found["ports"])
    print(
        f"{found['attacks']} attacks on {num_ports} ports, {num_answered} answers meanwhile:"
        f" {found['kinds']}"
    )
    assert found["attacks"] == NUM_ATTACKS
    assert num_ports >= 4, "two of the mesh, and of KV or experts"
    # A challenge and a proof, or a listener's greeting: no requested data.
    assert found["most_bytes"] <= 72
    if os.geteuid() == 0:
        assert found["opened"] == []
    assert server.pids() == pids
    assert server.log().count(" done in ") == num_formed, "no unit had to form anew"
    assert "refused" in server.log()
    wait_until(lambda: num_refused(server) >= found["attacks"] // 2, "the refusals are counted")
    assert [ask(server, number) for number in range(10, 14)] == wanted


@pytest.mark.promise(
    "Each deployment has one secret, drawn at start and stored in its 0600 run file"
)
@pytest.mark.more("a server of its own, for a look at its files")
def test_the_secret_is_nowhere_but_in_the_run_file(networked: Server) -> None:
    server = networked
    run_files = list(server.folder.rglob("run.json"))
    assert [path.stat().st_mode & 0o777 for path in run_files] == [0o600]
    assert run_files[0].parent.stat().st_mode & 0o777 == 0o700
    text = json.loads(run_files[0].read_text())["secret"]
    secret = base64.b64decode(text)
    assert len(secret) == 32
    for name, pid in server.pids().items():
        for part in ("cmdline", "environ"):
            content = Path(f"/proc/{pid}/{part}").read_bytes()
            assert text.encode() not in content
            assert secret not in content
            assert name == "gateway" or KEY.encode() not in content, (
                f"{name} has no use for the keys"
            )
    others = [path for path in server.folder.rglob("*") if path.is_file() and path not in run_files]
    for content in [server.log().encode(), *(path.read_bytes() for path in others)]:
        assert text.encode() not in content
        assert secret not in content


def listening(pids: set[int]) -> list[int]:
    """Return the TCP ports that these processes listen at."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(entry) if entry.is_symlink() else ""
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [
        int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes
    ]


def test_where_shared_memory_serves_all_nothing_listens(server: Server) -> None:
    pids = server.pids()
    assert len(listening({pids["gateway"]})) == 1, "the port of the API is seen"
    assert listening({pid for name, pid in pids.items() if name != "gateway"}) == []
