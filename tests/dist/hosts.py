"""Hosts on one machine: each has a network, processes, a name and shared memory of its own, and all
are joined by one bridge.

Needs root, ip, tc, nsenter and unshare (Debian: iproute2, util-linux).
Units on hosts have the gate of tests/dist/gate, as those of one host.
Hosts differ from real ones in that they share cores, a clock and the file system, where only the model
and what is installed is read.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hadal.runtime.resolve import model_folder
from hadal.runtime.transfer.pool import PREFIX, SHM_FOLDER
from tests.dist import gate
from tests.dist.serving import Server, to_toml
from tests.needs import skip_unless
from tests.waiting import DEADLINE_S, wait_until

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
NETWORK = "10.98.0"
PORT = 6379
"""Of the Ray head."""
TEMP = "/dev/shm/t"
"""Folder for temporary files, on each host its own."""
NODE_START_S = 60.0
"""A Ray node that starts on a busy machine takes this long."""
RAY = ("/ray/", "ray::", "hadal.runtime.ray_cluster")
"""Words in the command lines of Ray's own processes, but for `ray start`, which only waits, and in that
of the lender, its one client.
"""
_CLONE_NEWNET = 0x40000000
_INIT = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print(flush=True); signal.pause()"
"""The first process of a host: reaps what others leave, or a dead raylet counts as alive."""


def run(*command: str) -> None:
    """Run to its end, which is to be a good one."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def why_no_hosts() -> str:
    """Why hosts cannot be made here; empty if they can."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "tc", "nsenter", "unshare"))):
        return "hosts need root, ip, tc, nsenter and unshare"
    if not os.path.exists("/dev/net/tun"):
        return "hosts need /dev/net/tun, for slow links"
    name = f"hadal-probe-{os.getpid()}"
    made = subprocess.run(
        ["ip", "netns", "add", name], capture_output=True, timeout=DEADLINE_S, check=False
    )
    if made.returncode:
        return "there is no right to make network namespaces"
    run("ip", "netns", "delete", name)
    return ""


_WHY = why_no_hosts()
NEEDS_HOSTS = skip_unless(
    not _WHY, _WHY, "sudo make test, with apt-get install iproute2 util-linux"
)


def remove_network(name: str) -> None:
    """Delete a network namespace, if there is one of this name."""
    subprocess.run(
        ["ip", "netns", "delete", name], capture_output=True, timeout=DEADLINE_S, check=False
    )


def send_signal(process: subprocess.Popen[Any], number: int) -> None:
    """Send a signal to what a process of nsenter started: it passes none on."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), number)


class Host:
    """One of them. What runs on it dies with it."""

    def __init__(self, number: int, switch: str, environment: Mapping[str, str]) -> None:
        self.number = number
        self.address = f"{NETWORK}.{number + 1}"
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        self.num_cpus = 0
        """Of its Ray node."""
        self.label = ""
        """Of its Ray node, "key=value"."""
        self.environment = dict(environment)
        """Of all that is started on it."""
        self._net = f"{switch}-{number}"
        self._switch = switch
        self._init: subprocess.Popen[bytes] | None = None
        run("ip", "netns", "add", self._net)
        run(
            *("ip", "link", "add", "e0", "netns", self._net, "type", "veth"),
            *("peer", "name", f"h{number}", "netns", switch),
        )
        run("ip", "-n", switch, "link", "set", f"h{number}", "master", "br0", "up")
        run("ip", "-n", self._net, "addr", "add", f"{self.address}/24", "dev", "e0")
        run("ip", "-n", self._net, "link", "set", "e0", "up")
        run("ip", "-n", self._net, "link", "set", "lo", "up")
        self.boot()

    def boot(self) -> None:
        """Start its first process."""
        mounts = f"mount -t tmpfs tmpfs /dev/shm && mkdir {TEMP} && hostname host-{self.number}"
        self._init = subprocess.Popen(
            [
                *("ip", "netns", "exec", self._net),
                *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts"),
                *("/bin/sh", "-c", f'{mounts} && exec "$@"', "sh"),
                *(sys.executable, "-c", _INIT),
            ],
            stdout=subprocess.PIPE,
        )
        assert self._init.stdout is not None
        with self._init.stdout as output:
            output.readline()

    @property
    def _inner(self) -> int:
        """Pid here of its first process."""
        assert self._init is not None
        path = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children")
        return int(path.read_text().split()[0])

    @property
    def prefix(self) -> tuple[str, ...]:
        """Words before a command that run it there."""
        return ("nsenter", "-t", str(self._inner), "-n", "-m", "-p", "-u", "--")

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:
        """Start a process there; its output goes to a file, for `log`."""
        with open(self.log_path(name), "wb") as log:
            process = subprocess.Popen(
                [*self.prefix, *command],
                stdout=log,
                stderr=log,
                stdin=stdin,
                start_new_session=True,
                cwd=ROOT,
                env={
                    **os.environ,
                    "TMPDIR": TEMP,
                    **ENVIRONMENT,
                    **self.environment,
                    **(environment or {}),
                },
            )
        self.started[name] = process
        return process

    def signal(self, name: str, number: int) -> None:
        """Send a signal to what was started under this name."""
        send_signal(self.started[name], number)

    def log_path(self, name: str) -> Path:
        return LOGS / f"{self._net}-{name}.log"

    def log(self, name: str) -> str:
        return self.log_path(name).read_text(errors="replace")

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in a thread whose sockets are this host's."""
        result: list[Any] = []

        def inside() -> None:
            with open(f"/var/run/netns/{self._net}") as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            try:
                result.append((True, function()))
            except BaseException as error:
                result.append((False, error))

        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()  # What is called has deadlines of its own.
        is_good, value = result[0]
        if not is_good:
            raise value
        return value  # type: ignore[no-any-return]

    def processes(self) -> Iterator[Path]:
        """Folders in /proc of its processes."""
        space = os.readlink(f"/proc/{self._inner}/ns/pid")
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if path.name.isdecimal() and os.readlink(path / "ns/pid") == space:
                    yield path

    def pids(self, word: str) -> list[int]:
        """Pids here of its processes whose command line has this word."""
        found = []
        for path in self.processes():
            with contextlib.suppress(OSError):
                if word in (path / "cmdline").read_bytes().replace(b"\0", b" ").decode():
                    found.append(int(path.name))
        return found

    def num_bytes_sent(self) -> int:
        """Bytes that have left it, whatever sent them."""
        counts = Path(f"/proc/{self._inner}/net/dev").read_text().partition("e0:")[2].split()
        return int(counts[8])

    def names(self) -> Counter[str]:
        """Names of its processes, as those that are forked give themselves."""
        return Counter(name for _, name in self._pids_and_names())

    def pid_of(self, name: str) -> int:
        """Here, of the one process that gives itself this name."""
        [pid] = [pid for pid, found in self._pids_and_names() if found == name]
        return pid

    def _pids_and_names(self) -> Iterator[tuple[int, str]]:
        for path in self.processes():
            with contextlib.suppress(OSError):
                yield int(path.name), (path / "comm").read_text().strip()

    def pools(self) -> list[str]:
        """KV pools in its shared memory."""
        shared = Path(f"/proc/{self._inner}/root{SHM_FOLDER}")
        return [path.name for path in shared.glob(f"{PREFIX}*")]

    @property
    def has_ray(self) -> bool:
        """Whether its Ray node came up."""
        return "Ray runtime started" in self.log("ray")

    def kill_ray(self) -> None:
        """Kill its Ray node alone, the head if it is that."""
        words = ("ray start", "raylet", "gcs_server", "ray::", "default_worker", "ray/_private")
        for pid in {pid for word in words for pid in self.pids(word)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.started.pop("ray").wait(DEADLINE_S)

    def unplug(self) -> None:
        run("ip", "-n", self._switch, "link", "set", f"h{self.number}", "down")

    def plug(self) -> None:
        run("ip", "-n", self._switch, "link", "set", f"h{self.number}", "up")

    def shape(self, *discipline: str) -> None:
        """Limit or disturb what leaves it: the words of a queueing discipline of tc(8)."""
        run(
            *("ip", "netns", "exec", self._net, "tc", "qdisc", "replace", "dev", "e0", "root"),
            *discipline,
        )

    @contextlib.contextmanager
    def slow_link(self, delay_s: float, lost_share: float) -> Iterator[None]:
        """In the block, what it sends and what comes to it is late, and a share of it is lost."""
        command = [
            *("ip", "netns", "exec", self._switch, sys.executable, "-m", "tests.dist.link"),
            *(f"h{self.number}", "br0", str(delay_s), str(lost_share)),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as relay:
            assert relay.stdout is not None
            try:
                assert relay.stdout.readline(), "the relay has ended"
                yield
                assert relay.poll() is None, "the relay has ended"
            finally:
                relay.terminate()
                relay.wait(DEADLINE_S)

    def kill(self) -> None:
        """Kill all that runs on it at once, as a loss of power does. It can be booted again."""
        assert self._init is not None
        os.kill(self._inner, signal.SIGKILL)
        wait_until(self._has_ended, f"host {self.number} has ended")
        for process in self.started.values():
            process.wait(DEADLINE_S)
        self.started.clear()

    def _has_ended(self) -> bool:
        assert self._init is not None
        reap_orphans()
        return self._init.poll() is not None

    def remove(self) -> None:
        if self._init is not None and self._init.poll() is None:
            self.kill()
        remove_network(self._net)


def reap_orphans() -> None:
    """Reap processes of hosts whose starter was killed. They become children of this process where it
    is a subreaper (runtime/process/forks), and a host ends only when all that ran on it is reaped.
    """
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            fields = dict(line.partition(":")[::2] for line in status.read_text().splitlines())
            is_ours = int(fields["PPid"]) == os.getpid() and fields["State"].split()[0] == "Z"
            if is_ours and len(fields["NSpid"].split()) > 1:
                os.waitpid(int(fields["Pid"]), os.WNOHANG)


ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
    "HADAL_LEDGER": "off",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
    "RAY_worker_niceness": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))),
}
LOGS = Path("/tmp/hadal-hosts")


class Hosts:
    """Some hosts on a bridge. The first is the one with Ray's head and the supervisor."""

    _numbers = itertools.count()

    def __init__(self, num_hosts: int) -> None:
        LOGS.mkdir(exist_ok=True)
        self._switch = f"hadal-{os.getpid()}-{next(self._numbers)}"
        self.gate = gate.Gate(LOGS / f"{self._switch}-gate")
        """Holds the steps of all units on these hosts."""
        run("ip", "netns", "add", self._switch)
        run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", self._switch, "link", "set", "br0", "up")
        gated = os.pathsep.join((str(ROOT / "tests/dist/gated"), ENVIRONMENT["PYTHONPATH"]))
        told = {gate.VARIABLE: str(self.gate.path), "PYTHONPATH": gated}
        self.hosts = [Host(number, self._switch, told) for number in range(num_hosts)]

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]

    def start_ray(self, *num_cpus_of_each: int, is_volatile: bool = False) -> None:
        """A Ray node on each host, the first with the head, each with so many cores for units."""
        for host, num_cpus in zip(self.hosts, num_cpus_of_each, strict=True):
            host.num_cpus = num_cpus
        self.start_head(is_volatile=is_volatile)

        def are_up() -> bool:
            """Few start at once, for Ray gives a node up that takes 30 s, which cannot be set; such
            a one is tried again.
            """
            for host in self.hosts:
                self.keep_ray_node(host)
            coming = [host for host in self.hosts if "ray" in host.started and not host.has_ray]
            absent = [host for host in self.hosts if "ray" not in host.started]
            for host in absent[: max(0, (os.cpu_count() or 1) - len(coming))]:
                self.start_ray_node(host)
            return not coming and not absent

        wait_until(are_up, "Ray nodes", DEADLINE_S + NODE_START_S * len(self.hosts))

    def start_head(self, *, is_volatile: bool = False) -> None:
        head = self.hosts[0]
        storage = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": "/dev/shm/gcs"}
        head.start(
            "ray",
            [
                "ray",
                "start",
                "--head",
                f"--port={PORT}",
                "--include-dashboard=false",
                *_ray_options(head),
            ],
            {} if is_volatile else storage,
        )
        wait_until(lambda: head.has_ray, "the head to start")

    def start_ray_node(self, host: Host) -> None:
        host.start(
            "ray",
            [
                "ray",
                "start",
                f"--address={self.hosts[0].address}:{PORT}",
                *_ray_options(host),
            ],
        )

    def keep_ray_node(self, host: Host) -> None:
        """Start its Ray node again if that has ended."""
        node = host.started.get("ray")
        if node is not None and node.poll() is not None:
            self.start_ray_node(host) if host is not self.hosts[0] else self.start_head()

    def serve(self, folder: Path, name: str = "serve", number: int = 0, **tables: Any) -> Server:
        """Start `hadal serve` on a host, its units on the Ray nodes unless `tables`, which are
        fields of the deployment, say otherwise. `name`: of its log. Does not wait for it.
        """
        config = folder / "deployment.toml"
        fields = {
            "port": 8000,
            "console": {"mode": "off"},
            "model": str(model_folder("")),
            "cluster": self.cluster,
            **tables,
        }
        config.write_text(to_toml(fields))
        command = ["hadal", "serve", "--config", str(config), "--run-folder", str(folder / "run")]
        command.append("--open-to-network")  # It is these namespaces alone.
        process = self.hosts[number].start(name, command)
        return Server(process, folder / "run", self.hosts[number].log_path(name), self.gate)

    @property
    def cluster(self) -> dict[str, Any]:
        """The deployment's table. All hosts share this machine's cores, so they may be silent for
        longer than real ones.
        """
        address = f"{self.hosts[0].address}:{PORT}"
        return {"on": "ray", "address": address, "node_timeout_s": 10.0}

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(remove_network, self._switch)
            for host in self.hosts:
                stack.callback(host.remove)


def _ray_options(host: Host) -> list[str]:
    return [
        f"--node-ip-address={host.address}",
        f"--num-cpus={host.num_cpus}",
        *([f"--labels={host.label}"] if host.label else []),
        "--temp-dir=/dev/shm/r",
        "--object-store-memory=80000000",
        "--include-log-monitor=false",
        "--disable-usage-stats",
        "--block",
    ]
