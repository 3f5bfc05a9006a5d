"""Finding and building kernels, and the plain fallback if that is impossible."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hadal.commands.kernels import main as compile_now
from hadal.kernels import build, library
from hadal.kernels.experts import experts
from hadal.kernels.products import linear
from tests.processes import is_alive
from tests.stored import stored, stored_experts
from tests.waiting import DEADLINE_S, wait_until


@pytest.fixture
def fresh_load(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Load kernels anew in each test; elsewhere they are loaded once per process."""
    library.load.cache_clear()
    caplog.set_level(logging.INFO)
    yield caplog
    library.load.cache_clear()


def run_plain_ops() -> None:
    x, w = torch.randn(3, 8), torch.randn(5, 8)
    assert torch.equal(linear(x, stored(w)), x @ w.T)
    experts(
        x,
        stored_experts(torch.randn(2, 12, 8), torch.randn(2, 8, 6)),
        torch.tensor([[0], [1], [1]]),
        torch.ones(3, 1),
    )
    assert library.isa() == "plain"


@pytest.mark.promise("Without a compiler, or with HADAL_KERNELS=plain, the plain twins run.")
def test_the_plain_path_can_be_forced(
    fresh_load: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HADAL_KERNELS", "plain")
    run_plain_ops()
    assert fresh_load.text.count("plain torch") == 1


def test_an_instruction_set_that_the_processor_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HADAL_KERNELS", "avx512")
    build.check_asked("avx512")
    with pytest.raises(
        build.BuildError, match="'avx512', and the kernels here were built for avx2"
    ):
        build.check_asked("avx2")
    monkeypatch.delenv("HADAL_KERNELS")
    build.check_asked("avx2")


@pytest.mark.promise("Without a compiler, or with HADAL_KERNELS=plain, the plain twins run.")
@pytest.mark.promise("without one everything runs in plain torch, slower")
def test_no_compiler_is_logged_once_and_the_plain_path_runs(
    fresh_load: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("HADAL_CACHE_DIR", str(tmp_path))
    run_plain_ops()
    assert fresh_load.text.count("no C++ compiler (no-such-compiler)") == 1


def test_a_failing_compiler_leaves_nothing_behind(
    fresh_load: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", str(script(tmp_path / "broken", "echo no luck >&2; exit 1")))
    monkeypatch.setenv("HADAL_CACHE_DIR", str(tmp_path / "cache"))
    run_plain_ops()
    assert "no luck" in fresh_load.text
    assert not list((tmp_path / "cache").glob("*.so"))


def test_a_cache_that_cannot_be_written_is_a_reason_too(
    fresh_load: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HADAL_CACHE_DIR", str(tmp_path / "file"))
    run_plain_ops()
    assert "HADAL_CACHE_DIR" in fresh_load.text


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    """Start processes together, with a stand-in compiler that counts its runs."""
    compiler = script(
        tmp_path / "slow",
        '[ "$1" = --version ] && exit 0; echo run >> "$0.runs"; sleep 0.5; for last; do :; done;'
        ' echo > "$last"',
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(build.__file__).parents[2]),
        "CXX": str(compiler),
        "HADAL_CACHE_DIR": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-c", "from hadal.kernels.build import build\nprint(build())"]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    results = {process.communicate(timeout=DEADLINE_S)[0] for process in processes}
    assert len(results) == 1
    assert Path(results.pop().strip()).exists()
    assert (tmp_path / "slow.runs").read_text() == "run\n"


def test_a_compiler_that_does_not_end_is_ended_with_all_its_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = script(
        tmp_path / "slow", '[ "$1" = --version ] && exit 0; sleep 60 & echo $! > "$0.pid"; wait'
    )
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("HADAL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "COMPILE_TIMEOUT_S", 0.5)
    heard: list[float] = []
    pid = tmp_path / "slow.pid"

    def hear(elapsed_s: float) -> None:
        heard.append(elapsed_s)
        wait_until(lambda: pid.exists() and pid.read_text().strip(), "the compiler runs")

    with pytest.raises(build.TimedOut, match="did not finish"):
        build.build(hear)
    assert heard
    assert heard == sorted(heard)
    wait_until(lambda: not is_alive(int(pid.read_text())), "its process has ended")
    assert not list((tmp_path / "cache").glob("*.so"))


@pytest.mark.parametrize(
    ("compiler", "code", "text"),
    [
        ("no-such-compiler", 0, "Hadal runs without them, slower"),
        ("exit 1", 0, "Hadal runs without them, slower"),
        ("sleep 60", 1, "try again when it has less to do"),
        ("", 0, "HADAL_KERNELS is plain"),
    ],
)
def test_setup_tells_what_became_of_the_kernels(
    compiler: str,
    code: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Run the setup: it fails if the compiler takes too long, but not if there is none or it fails."""
    is_there = " " in compiler
    made = (
        script(tmp_path / "cxx", f'[ "$1" = --version ] && exit 0; {compiler}')
        if is_there
        else compiler
    )
    monkeypatch.setenv("CXX", str(made))
    monkeypatch.setenv("HADAL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HADAL_KERNELS", "" if compiler else "plain")
    if compiler == "sleep 60":
        monkeypatch.setattr(build, "COMPILE_TIMEOUT_S", 0.5)
    assert compile_now() == code
    told = capsys.readouterr()
    assert text in told.out + told.err


def test_a_process_that_compiles_says_so_once(
    fresh_load: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = script(
        tmp_path / "slow",
        '[ "$1" = --version ] && exit 0; until [ -e "$0.go" ]; do sleep 0.05; done; exit 1',
    )
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("HADAL_CACHE_DIR", str(tmp_path / "cache"))
    heard: list[float] = []

    def hear(elapsed_s: float) -> None:
        heard.append(elapsed_s)
        if len(heard) == 2:
            (tmp_path / "slow.go").touch()

    library.prepare(hear)
    assert len(heard) >= 2
    assert fresh_load.text.count("being compiled for this machine") == 1


def test_the_key_names_what_decides_the_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "a.cpp"
    source.write_text("1")
    keys = {build._key(["echo"], build.FLAGS, [source])}
    source.write_text("2")
    keys.add(build._key(["echo"], build.FLAGS, [source]))
    monkeypatch.setattr(build, "FLAGS", ("-O0",))
    keys.add(build._key(["echo"], build.FLAGS, [source]))
    monkeypatch.setattr(build, "_cpu_features", lambda: b"another machine")
    keys.add(build._key(["echo"], build.FLAGS, [source]))
    assert len(keys) == 4
