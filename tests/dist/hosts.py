"""Hosts on one machine, joined by one bridge. Each has its own network, processes, host name and
shared memory.

Needs root, ip, tc, nsenter and unshare (Debian: iproute2, util-linux). Units on hosts have the gate
of tests/dist/gate, like those of one host. Unlike real hosts, these share cores, a clock and the
file system. Only the model and installed software are read from that file system.
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
"""Port of the Ray head."""
TEMP = "/dev/shm/t"
"""Folder for temporary files, separate on each host."""
NODE_START_S = 60.0
"""Time that a Ray node takes to start on a busy machine."""
RAY = ("/ray/", "ray::", "hadal.runtime.ray_cluster")
"""Words in the command lines of Ray's own processes and of the node provider, its one client. `ray start`
is missing on purpose, for it only waits.
"""
_CLONE_NEWNET = 0x40000000
_INIT = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print(flush=True); signal.pause()"
"""Program of a host's first process: reaps orphans, because an unreaped raylet counts as alive."""


def run(*command: str) -> None:
    """Run a command to its end; raises AssertionError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def why_no_hosts() -> str:
    """Return why hosts cannot be made here; empty if they can."""
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
    """Delete the network namespace of this name, if it exists."""
    subprocess.run(
        ["ip", "netns", "delete", name], capture_output=True, timeout=DEADLINE_S, check=False
    )


def send_signal(process: subprocess.Popen[Any], number: int) -> None:
    """Send a signal to the child of an nsenter process, which does not forward signals itself."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), number)


class Host:
    """One host of `Hosts`. When its first process ends, the kernel kills all its other processes."""

    def __init__(self, number: int, switch: str, environment: Mapping[str, str]) -> None:
        self.number = number
        self.address = f"{NETWORK}.{number + 1}"
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        self.num_cpus = 0
        """Number of cores that the host's Ray node offers to units."""
        self.label = ""
        """Label of the host's Ray node, "key=value"."""
        self.environment = dict(environment)
        """Environment of every process started on this host."""
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
        """Start the host's first process, in new namespaces."""
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
        """Pid of the host's first process, in this process's namespace."""
        assert self._init is not None
        path = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children")
        return int(path.read_text().split()[0])

    @property
    def prefix(self) -> tuple[str, ...]:
        """Command prefix that runs a command on this host."""
        return ("nsenter", "-t", str(self._inner), "-n", "-m", "-p", "-u", "--")

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[bytes]:
        """Start a process on this host; its output goes to the file that `log` reads."""
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
        """Send a signal to the process started under this name."""
        send_signal(self.started[name], number)

    def log_path(self, name: str) -> Path:
        return LOGS / f"{self._net}-{name}.log"

    def log(self, name: str) -> str:
        return self.log_path(name).read_text(errors="replace")

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in a thread with this host's network."""
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
        thread.join()  # The function has deadlines of its own.
        is_good, value = result[0]
        if not is_good:
            raise value
        return value  # type: ignore[no-any-return]

    def processes(self) -> Iterator[Path]:
        """Yield the /proc folders of the host's processes."""
        space = os.readlink(f"/proc/{self._inner}/ns/pid")
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if path.name.isdecimal() and os.readlink(path / "ns/pid") == space:
                    yield path

    def pids(self, word: str) -> list[int]:
        """Return pids, as seen here, of the host's processes with this word in their command line."""
        found = []
        for path in self.processes():
            with contextlib.suppress(OSError):
                if word in (path / "cmdline").read_bytes().replace(b"\0", b" ").decode():
                    found.append(int(path.name))
        return found

    def num_bytes_sent(self) -> int:
        """Return the bytes sent by all processes of the host."""
        counts = Path(f"/proc/{self._inner}/net/dev").read_text().partition("e0:")[2].split()
        return int(counts[8])

    def names(self) -> Counter[str]:
        """Return a count of process names on the host, as forked processes set them."""
        return Counter(name for _, name in self._pids_and_names())

    def pid_of(self, name: str) -> int:
        """Return the pid, in this process's namespace, of the one process with this name."""
        [pid] = [pid for pid, found in self._pids_and_names() if found == name]
        return pid

    def _pids_and_names(self) -> Iterator[tuple[int, str]]:
        for path in self.processes():
            with contextlib.suppress(OSError):
                yield int(path.name), (path / "comm").read_text().strip()

    def pools(self) -> list[str]:
        """Return names of the KV pools in the host's shared memory."""
        shared = Path(f"/proc/{self._inner}/root{SHM_FOLDER}")
        return [path.name for path in shared.glob(f"{PREFIX}*")]

    @property
    def has_ray(self) -> bool:
        """True if the host's last started Ray node has reported its start."""
        return "Ray runtime started" in self.log("ray")

    def kill_ray(self) -> None:
        """Kill only the host's Ray node, or the head if it runs here."""
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
        """Limit or disturb the host's outgoing traffic, by the words of a queueing discipline of tc(8)."""
        run(
            *("ip", "netns", "exec", self._net, "tc", "qdisc", "replace", "dev", "e0", "root"),
            *discipline,
        )

    @contextlib.contextmanager
    def slow_link(self, delay_s: float, lost_share: float) -> Iterator[None]:
        """Within the block, delay the host's traffic in both directions and lose a share of it."""
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
        """Kill all processes of the host, as a power loss does. `boot` starts the host again."""
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
    """Reap processes of hosts that have lost their parent. They become children of this process if
    it is a subreaper (runtime/process/forks), and a host ends only when all its processes are
    reaped.
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
    """Hosts on one bridge. The first runs Ray's head and, by default, the supervisor."""

    _numbers = itertools.count()

    def __init__(self, num_hosts: int) -> None:
        LOGS.mkdir(exist_ok=True)
        self._switch = f"hadal-{os.getpid()}-{next(self._numbers)}"
        self.gate = gate.Gate(LOGS / f"{self._switch}-gate")
        """Gate for the steps of all units on these hosts."""
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
        """Start a Ray node on each host, with these numbers of cores for units. The first is the head.
        `is_volatile`: the head's state is lost when it ends.
        """
        for host, num_cpus in zip(self.hosts, num_cpus_of_each, strict=True):
            host.num_cpus = num_cpus
        self.start_head(is_volatile=is_volatile)

        def are_up() -> bool:
            """Return whether all nodes run; start a few more at a time. Ray abandons a node that takes
            30 s to start, a limit that cannot be set; such a node is started again.
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
        """Start the host's Ray node again if it has ended."""
        node = host.started.get("ray")
        if node is not None and node.poll() is not None:
            self.start_ray_node(host) if host is not self.hosts[0] else self.start_head()

    def serve(self, folder: Path, name: str = "serve", number: int = 0, **tables: Any) -> Server:
        """Start `hadal serve` on a host and return without waiting. `tables`: fields of the
        deployment; by default units run on the Ray nodes. `name`: name of its log.
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
        command.append("--open-to-network")  # The network is made of these namespaces alone.
        process = self.hosts[number].start(name, command)
        return Server(process, folder / "run", self.hosts[number].log_path(name), self.gate)

    @property
    def cluster(self) -> dict[str, Any]:
        """Table `cluster` of the deployment. All hosts share this machine's cores, so the timeout
        for silent nodes is longer than usual.
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
