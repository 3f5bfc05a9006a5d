"""Compile the C++ kernels once per machine, into a shared library in the user's cache.

Depends on compilers, files and locks, not on the library's content. The library's name is a hash of
all its inputs (sources, flags, compiler, CPU features), so a stale library is never loaded, and a
library is never rebuilt in place.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

SOURCES = Path(__file__).parent / "cpu"
MAIN_SOURCE = "api.cpp"
FLAGS = (
    "-std=c++20",
    "-O3",
    "-shared",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    # Fuse every multiply-add. With errno and traps, sqrt and selects could not be vectorised.
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    # Not -ffast-math: it reorders sums (a token's result would depend on the tile it falls in) and
    # assumes that there is no infinity or NaN (softmax's first maximum is -inf, and a NaN must
    # reach the caller, not vanish).
)
KERNELS = "HADAL_KERNELS"
"""Environment variable with the kernels' instruction set, or "plain" for torch without kernels."""
PLAIN = "plain"
BEST = "best"
INSTRUCTION_SETS = {
    BEST: ("-march=native",),
    "amx": ("-march=native",),
    "avx512": ("-march=native", "-mno-amx-tile"),
    "avx2": ("-march=native", "-mno-avx512f"),
    "generic": (),
}
"""Compiler flags of each instruction set. A library is compiled for one set, because a token must
not depend on the code path that computed a product.
"""
COMPILE_TIMEOUT_S = 3600
"""Timeout of a compilation, which needs half a minute of a core: a busy machine may give it 1 %."""
_POLL_S = 0.2
_VERSION_TIMEOUT_S = 60.0

OnElapsed = Callable[[float], None]
"""Callback during a compilation, here or in another process, with the seconds waited so far."""


class BuildError(RuntimeError):
    """Error: there is no library as requested; the message has the reason."""


class TimedOut(BuildError):
    """Error: the compilation timed out; a later attempt may succeed."""


def instruction_set() -> str:
    """Return the value of HADAL_KERNELS, or BEST. Raises BuildError for an unknown value."""
    asked = os.environ.get(KERNELS) or BEST
    if asked != PLAIN and asked not in INSTRUCTION_SETS:
        known = ", ".join((PLAIN, *INSTRUCTION_SETS))
        raise BuildError(f"{KERNELS} is {asked!r}; it may be one of {known}.")
    return asked


def runs_plain() -> bool:
    """Return True if plain torch is requested or there is no compiler: every op then runs in plain
    torch. Raises BuildError for an unknown value of HADAL_KERNELS.
    """
    if instruction_set() == PLAIN:
        return True
    try:
        _compiler()
    except BuildError:
        return True
    return False


def check_asked(found: str) -> None:
    """Raise BuildError unless the library's instruction set `found`, or BEST, is requested."""
    asked = instruction_set()
    if asked not in (BEST, found):
        raise BuildError(f"{KERNELS} is {asked!r}, and the kernels here were built for {found}.")


def build(on_elapsed: OnElapsed = lambda elapsed_s: None) -> Path:
    """Return the compiled library, compiling it if it is not in the cache. Raises BuildError."""
    compiler, flags = _compiler(), (*FLAGS, *INSTRUCTION_SETS[instruction_set()])
    try:
        sources = sorted(path for path in SOURCES.iterdir() if path.suffix in (".h", ".cpp"))
        key = _key(compiler, flags, sources)
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        library = folder / f"kernels-{key}.so"
        if library.exists():
            return library
        start_s = time.monotonic()
        with only_one(
            folder / f"kernels-{key}.lock", lambda: on_elapsed(time.monotonic() - start_s)
        ):
            if not library.exists():  # Another process may have built it meanwhile.
                _compile([*compiler, *flags], library, on_elapsed)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(
            f"no kernels were built: {error}. To build in another folder, set HADAL_CACHE_DIR."
        ) from error
    return library


def cache_folder() -> Path:
    """Return `$HADAL_CACHE_DIR`, or hadal's folder in the XDG cache."""
    own = os.environ.get("HADAL_CACHE_DIR")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hadal"


def _compiler() -> list[str]:
    """Return the command in `$CXX`, or the first known compiler on the PATH. Raises BuildError."""
    asked = shlex.split(os.environ.get("CXX", ""))
    for command in [asked] if asked else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    name = asked[0] if asked else "c++, g++ or clang++"
    raise BuildError(
        f"no C++ compiler ({name}) was found. Install g++ or clang++, or name one in CXX."
    )


def _key(compiler: list[str], flags: tuple[str, ...], sources: list[Path]) -> str:
    version = subprocess.run(
        [*compiler, "--version"], capture_output=True, timeout=_VERSION_TIMEOUT_S, check=False
    )
    texts = [path.name.encode() + b"\0" + path.read_bytes() for path in sources]
    parts = [*texts, " ".join((*compiler, *flags)).encode(), version.stdout, _cpu_features()]
    return hashlib.sha256(b"\0\0".join(parts)).hexdigest()[:20]


def _cpu_features() -> bytes:
    """Return the CPU's features, which decide -march=native: machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}".encode()
    wanted = ("flags", "Features", "model name", "CPU part")
    return "\n".join(
        [platform.machine(), *sorted({line for line in lines if line.startswith(wanted)})]
    ).encode()


@contextlib.contextmanager
def only_one(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a file lock, so that only one process compiles. The lock ends with its process.
    `waiting` is called every _POLL_S while another process has the lock.
    """
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting()
                time.sleep(_POLL_S)
        yield


def _compile(compile_command: list[str], library: Path, on_elapsed: OnElapsed) -> None:
    handle, name = tempfile.mkstemp(suffix=".so", prefix="building-", dir=library.parent)
    os.close(handle)
    try:
        command = [*compile_command, str(SOURCES / MAIN_SOURCE), "-o", name]
        code, said = _run(command, on_elapsed)
        if code != 0:
            raise BuildError(f"{shlex.join(command)} failed: {said.strip()[-800:]}")
        os.replace(name, library)  # Atomic: a reader never sees half a library.
    finally:
        Path(name).unlink(missing_ok=True)


def _run(command: list[str], on_elapsed: OnElapsed) -> tuple[int, str]:
    """Return (exit code, output) of the compiler. Raises TimedOut."""
    start_s = time.monotonic()
    with tempfile.TemporaryFile() as output:
        # In its own session, so that a timeout kills all processes of the compiler.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                elapsed_s = time.monotonic() - start_s
                on_elapsed(elapsed_s)
                if elapsed_s > COMPILE_TIMEOUT_S:
                    raise TimedOut(f"the compiler did not finish within {COMPILE_TIMEOUT_S} s.")
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return process.returncode, output.read().decode("utf-8", "replace")
