"""A wheel has all that `hadal serve` needs outside a checkout: the model, deployments and the
kernels' sources.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.dist.conftest import StartServer
from tests.waiting import DEADLINE_S, PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("src", "models", "configs", "pyproject.toml", "README.md", "LICENSE")
"""Paths that a wheel is built from."""
WITHOUT = shutil.ignore_patterns("__pycache__", "*.egg-info")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the installed wheel of this checkout. It is built from a copy, because setuptools
    writes beside its sources.
    """
    folder = tmp_path_factory.mktemp("wheel")
    for part in PARTS:
        source, copy = ROOT / part, folder / "checkout" / part
        if source.is_dir():
            shutil.copytree(source, copy, symlinks=True, ignore=WITHOUT)
        else:
            shutil.copy(source, copy)
    _pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(folder / "checkout"))
    [wheel] = folder.glob("*.whl")
    shutil.rmtree(folder / "checkout")
    _pip("install", "--no-deps", "--no-index", "--target", str(folder / "site"), str(wheel))
    return folder / "site"


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.promise("the wheel has hadal-tiny, the deployments and the kernels' sources")
def test_it_finds_its_model_its_deployments_and_its_kernels(
    installed: Path, tmp_path: Path
) -> None:
    code = """
import hadal
from pathlib import Path
from hadal.core.config import read_deployment
from hadal.kernels.build import MAIN_SOURCE, SOURCES
from hadal.runtime.resolve import *
print(hadal.__file__)
print(resolve(Deployment()).deployment.model)
print(plan(read_deployment(deployment_file(Path("v3_ep32_ep144")))).deployment.model)
print(SOURCES / MAIN_SOURCE)
print(Path(hadal.__file__).parent / "results" / "templates" / "day.html")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, "PYTHONPATH": str(installed)},
    )
    assert done.returncode == 0, done.stderr
    found = done.stdout.splitlines()
    assert len(found) == 5
    for path in found:
        assert Path(path).is_relative_to(installed), path
        assert Path(path).exists()
    assert not any(path.is_symlink() for path in installed.rglob("*"))


@pytest.mark.promise("the wheel has hadal-tiny, the deployments and the kernels' sources")
@pytest.mark.more("the other test finds all that a wheel has")
def test_it_serves(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_server: StartServer
) -> None:
    monkeypatch.chdir(tmp_path)
    server = start_server(environment={"PYTHONPATH": str(installed)}, model="")
    environment = Path(f"/proc/{server.pids()['gateway']}/environ").read_text()
    assert f"PYTHONPATH={installed}:" in environment, "the processes run what the wheel installed"
    body = {"model": "hadal-tiny", "messages": [{"role": "user", "content": "What is 12 + 30?"}]}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    assert "42" in reply.json()["choices"][0]["message"]["content"]
