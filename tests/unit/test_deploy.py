"""The image, the compose file and the systemd unit: their files exist and fit together, and `hadal`
takes their options. No container runs here.
"""

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from hadal.cli import app
from hadal.core.config import Deployment
from hadal.core.errors import EXIT_CONFIG
from hadal.runtime.pool_sizes import Room
from hadal.runtime.resolve import plan
from tests.needs import leave_out
from tests.unit.test_manifests import IMAGE_USER
from tests.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
HADAL = COMPOSE["services"]["hadal"]
IMAGES = [DEPLOY / "Containerfile", DEPLOY / "kuberay" / "Dockerfile"]
END_S = 25
"""Seconds for `hadal serve` to end its processes after a drain (tests/unit/test_manifests.py)."""


def steps(path: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Containerfile."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line]


def one(name: str) -> str:
    [found] = [value for step, value in steps(IMAGES[0]) if step == name]
    return found


def served(arguments: list[str]) -> dict[str, Any]:
    """Return the options of a `serve` command line; fail for an unknown one."""
    assert arguments[0] == "serve"
    context = get_command(app).commands["serve"].make_context("serve", arguments[1:])
    return context.params


def compose_options() -> dict[str, Any]:
    return served(HADAL["command"])


def unit() -> dict[str, list[str]]:
    text = (DEPLOY / "hadal.service").read_text().replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, is_value, value = line.partition("=")
        if is_value and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def unit_options() -> dict[str, Any]:
    [start] = unit()["ExecStart"]
    command, *arguments = shlex.split(start)
    assert Path(command).name == "hadal"
    return served(arguments)


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_an_image_is_made_of_what_is_there(path: Path) -> None:
    sources = [
        source for step, value in steps(path) if step == "COPY" for source in value.split()[:-1]
    ]
    assert sources
    assert [source for source in sources if not (ROOT / source).exists()] == []


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    if not hadolint.exists():
        leave_out("no hadolint", "make setup")
    command = [str(hadolint), "--ignore=DL3008", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_has_all_that_a_wheel_is_built_from() -> None:
    copied = {
        source for step, value in steps(IMAGES[0]) if step == "COPY" for source in value.split()
    }
    assert {"src", "models", "configs", "pyproject.toml", "README.md", "LICENSE"} <= copied
    links = [path for path in (ROOT / "src" / "hadal").iterdir() if path.is_symlink()]
    assert {str(path.resolve().relative_to(ROOT)) for path in links} <= copied


@pytest.mark.promise("an image that runs as an unprivileged user (uid 10001)")
def test_the_image_runs_as_nobody_special_and_serves_what_it_exposes() -> None:
    user = one("USER")
    assert user == HADAL["user"] == "10001:10001"
    options = served(yaml.safe_load(one("CMD")))
    assert options["host"] == "0.0.0.0"
    assert options["api_keys_file"]
    assert options["no_console"]
    assert int(one("EXPOSE")) == (options["port"] or Deployment().port)
    health = shlex.split(" ".join(yaml.safe_load(one("HEALTHCHECK").partition("CMD ")[2])))
    assert health == ["hadal", "status", "--run-folder", str(options["run_folder"])]
    made = " ".join(value for step, value in steps(IMAGES[0]) if step == "RUN")
    for folder in (*yaml.safe_load(one("VOLUME")), str(options["run_folder"])):
        assert folder in made, "its owner is the user"
    assert f"--uid {user.partition(':')[0]} " in made


def test_the_pods_image_runs_as_a_user_that_it_makes() -> None:
    user = [value for step, value in steps(IMAGES[1]) if step == "USER"]
    assert user == [f"{IMAGE_USER}:{IMAGE_USER}"]
    made = " ".join(value for step, value in steps(IMAGES[1]) if step == "RUN")
    assert f"useradd --uid {IMAGE_USER} " in made


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_an_image_can_be_built_from_a_digest(path: Path) -> None:
    asked = dict(value.split("=", 1) for step, value in steps(path) if step == "ARG")
    assert [value for step, value in steps(path) if step == "FROM"] == ["${BASE}"]
    assert asked["BASE"].partition(":")[2], "a tag at least"


FIXED = {
    "jinja2": "3.1.6",  # CVE-2025-27516, CVE-2024-56326: escapes from the sandbox
    "starlette": "0.49.1",  # CVE-2025-62727: Range headers
    "python-multipart": "0.0.31",  # CVE-2026-24486, -40347, -42561, -53540
}
"""Packages that parse data from clients -> first version without known vulnerabilities."""


@pytest.mark.parametrize("name", FIXED)
def test_no_version_with_a_known_hole_can_be_installed(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    floors = dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(project["dependencies"]), re.M))
    pins = dict(line.split("==") for line in (ROOT / "requirements.txt").read_text().split())
    for version in (floors[name], pins[name]):
        assert [*map(int, version.split("."))] >= [*map(int, FIXED[name].split("."))]


def test_compose_mounts_what_is_there_and_defines_what_it_names() -> None:
    assert (DEPLOY / HADAL["build"]["context"]).resolve() == ROOT
    assert (ROOT / HADAL["build"]["dockerfile"]) == IMAGES[0]
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            if source == "./keys":  # The file's first lines say how to make it.
                assert "deploy/keys " in (DEPLOY / "compose.yaml").read_text()
            elif source.startswith("."):
                assert (DEPLOY / source).exists(), source
            else:
                assert source in COMPOSE["volumes"], source
        assert set(service.get("depends_on", ())) <= COMPOSE["services"].keys()
        assert ":latest" not in service["image"]
        assert ":" in service["image"]


def test_compose_starts_a_server_that_can_run() -> None:
    options, deployment = compose_options(), Deployment()
    assert HADAL["ports"] == [f"{options['port']}:{options['port']}"]
    keys = next(mount for mount in HADAL["volumes"] if mount.startswith("./keys:"))
    # Mount the folder: a single mounted file would keep the content of the container's start.
    assert keys == f"./keys:{options['api_keys_file'].parent}:ro"
    writable = {mount.split(":")[1] for mount in HADAL["volumes"]}
    writable |= {mount.partition(":")[0] for mount in HADAL["tmpfs"]}
    for folder in (options["run_folder"], options["cache_folder"], "/var/lib/hadal/x"):
        assert any(Path(folder).is_relative_to(mount) for mount in writable), folder
    seconds = int(HADAL["stop_grace_period"].removesuffix("s"))
    assert seconds >= deployment.drain_timeout_s + END_S
    shm_bytes = int(HADAL["shm_size"].removesuffix("gb")) << 30
    pools = [plan(deployment, Room(1 << 40, most)).memory.kv_bytes for most in (shm_bytes, 1 << 40)]
    assert pools[0] == pools[1], "/dev/shm keeps no pool small"
    assert HADAL["cap_drop"] == ["ALL"]
    assert HADAL["read_only"]


@pytest.mark.promise(
    "SIGTERM lets streams finish; after an error in the deployment (exit 2) systemd "
    "does not restart the server"
)
def test_the_unit_of_systemd_fits_its_command() -> None:
    options, found = unit_options(), unit()
    assert options["api_keys_file"]
    assert options["no_console"]
    assert float(found["TimeoutStopSec"][0]) >= Deployment().drain_timeout_s + END_S
    assert found["RestartPreventExitStatus"] == [str(EXIT_CONFIG)]
    assert str(options["run_folder"]) == f"/run/{found['RuntimeDirectory'][0]}"
    assert options["cache_folder"].startswith(f"/var/cache/{found['CacheDirectory'][0]}/")
    [environment] = found["Environment"]
    assert environment.split() == ["XDG_STATE_HOME=/var/lib", "XDG_CACHE_HOME=/var/cache"]
    assert found["StateDirectory"] == ["hadal"]


@pytest.mark.needs("systemd")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "hadal.service").read_text()
    command = text.partition("ExecStart=")[2].split()[0]
    (tmp_path / "hadal").write_text("#!/bin/sh\n")
    (tmp_path / "hadal").chmod(0o755)
    made = tmp_path / "hadal.service"
    made.write_text(text.replace(command, str(tmp_path / "hadal")))
    verify = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(made)]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stderr + done.stdout) == (0, "")
    made.write_text(made.read_text().replace("KillMode=mixed", "KillMode=mixt"))
    done = subprocess.run(verify, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert "kill mode" in done.stderr, "it does look"
