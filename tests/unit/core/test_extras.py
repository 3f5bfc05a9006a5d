"""The package's extras: commands that need one say so, and the API works without them."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from hadal.core.extras import EXTRA_TO_MODULES, install_hint, missing_modules
from hadal.runtime import resolve as resolving
from tests.test_tidy import HOUSES, MAY_IMPORT, SRC, python_files, room_of

ROOT = Path(__file__).resolve().parents[3]
WITHOUT = ("nicegui", "httpx_sse", "plotly", "pebble")
"""Modules that only an extra installs; rich installs the extras' other modules as well."""
BLOCK = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {WITHOUT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
"""


def run(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", BLOCK + code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"PYTHONPATH": str(SRC.parent)},
    )


def test_the_package_names_the_same() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extra, modules in EXTRA_TO_MODULES.items():
        needed = {
            re.match(r"[A-Za-z0-9-]+", one)[0].lower()  # type: ignore[index]
            for one in project["optional-dependencies"][extra]
        }
        found = packages_distributions()
        assert {found[module][0].lower() for module in modules} == needed
        assert not missing_modules(extra)
    assert len(project["dependencies"]) <= 19


@pytest.mark.promise("Without extras it serves the API.")
def test_what_serves_needs_no_extra() -> None:
    rooms = MAY_IMPORT.keys() - {room for room in MAY_IMPORT if room.partition("/")[0] in HOUSES}
    modules = [
        ".".join(path.relative_to(SRC.parent).with_suffix("").parts)
        for path in python_files("src/hadal")
        if room_of(path) in rooms and "ray_cluster" not in path.name and path.stem != "__init__"
    ]
    done = run(f"for name in {modules}: __import__(name)")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "module", "extra"),
    [
        (("simulate", "--preset", "published"), "pebble", "lab"),
        (("chat", "--url", "http://127.0.0.1:9"), "httpx_sse", "apps"),
        (("console", "--url", "http://127.0.0.1:9"), "nicegui", "apps"),
        (("bench", "http://127.0.0.1:9"), "httpx_sse", "apps"),
    ],
)
def test_a_command_without_its_extra_names_it(
    words: tuple[str, ...], module: str, extra: str
) -> None:
    done = run("from hadal.cli import app; app()", *words)
    assert done.returncode == 2, done.stderr
    assert f"{module} is not installed" in done.stderr or "plotly is not installed" in done.stderr
    assert f"pip install 'hadal[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_other_missing_modules_are_no_extra_s() -> None:
    assert install_hint("hadal.nothing") is None
    assert install_hint("plotly.offline") == (
        "plotly is not installed. It comes with an extra: pip install 'hadal[apps]' or pip install"
        " 'hadal[lab]'."
    )


def test_without_them_no_pages_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolving, "missing_modules", lambda extra: ("nicegui",))
    deployment = resolving.Deployment(model=str(ROOT / "models" / "hadal-tiny"), port=0)
    resolved = resolving.resolve(deployment)
    assert resolved.deployment.console.mode == "off"
    assert any("no pages are served: nicegui" in one for one in resolved.memory.warnings)
