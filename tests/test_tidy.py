"""Rules of the tree: allowed imports, modules that deciding code may not use, and the length of
functions.

ARCHITECTURE.md describes the tables here. Change a rule here on purpose or not at all.
"""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "hadal"

MAY_IMPORT: dict[str, set[str]] = {
    "core": set(),
    "progress": set(),
    "overlap": {"core"},
    "reference": {"core"},
    "tokens": {"core"},
    "comm": {"core", "reference", "kernels"},
    "policy": {"core"},
    "kv": {"core", "policy"},
    "stats": {"core"},
    "perf": {"core", "overlap"},
    "kernels": {"core", "reference"},
    "roles": {"core", "policy", "overlap", "perf", "kv", "stats"},
    "model": {"core", "overlap", "kernels", "reference", "comm", "tokens"},
    "runtime": {
        "core",
        "kv",
        "policy",
        "kernels",
        "model",
        "roles",
        "comm",
        "overlap",
        "stats",
        "progress",
        "tokens",
    },
    "gateway": {"core", "policy", "overlap", "roles", "runtime", "stats", "tokens"},
    "commands": {
        "core",
        "policy",
        "perf",
        "overlap",
        "stats",
        "roles",
        "kernels",
        "runtime",
        "gateway",
        "progress",
        "results",
        "lab/sim",
        "lab/perf",
        "lab/plan",
        "lab/simulate",
        "apps/bench",
        "apps/console",
    },
    "results": {"core"},
    "lab/perf": {"core", "overlap", "perf"},
    "lab/sim": {"core", "kv", "overlap", "perf", "policy", "roles", "stats", "lab/perf"},
    "lab/simulate": {
        "core",
        "overlap",
        "policy",
        "roles",
        "stats",
        "runtime",
        "gateway",
        "progress",
        "results",
        "lab/perf",
        "lab/sim",
    },
    "lab/plan": {"core", "policy", "perf", "progress", "results", "lab/perf", "lab/sim"},
    "apps/bench": {"core", "progress", "results", "stats"},
    "apps/console": {"core", "overlap", "roles", "runtime", "gateway", "stats"},
    "apps/terminal": {"core", "runtime"},
    "cli": {
        "core",
        "policy",
        "gateway",
        "runtime",
        "stats",
        "commands",
        "progress",
        "apps/terminal",
    },
}
"""Room -> rooms it may import, besides itself. `cli` and `progress` are single modules that count
as rooms. A room of a house has the house's name before its own. Only `commands` and `cli` import
from other houses.
"""
HOUSES = ("lab", "apps")
"""Folders of rooms that need an extra of the package."""
GATEWAY_MAY_IMPORT: dict[str, set[str]] = {
    "edge": set(),
    "text": {"edge"},
    "api": {"edge", "text"},
    "desk": {"edge", "text", "api"},
    "": {"edge", "text", "api", "desk"},
}
"""Room of the gateway -> its rooms that it may import, besides itself. "": files beside the rooms,
which connect them.
"""

DECIDE = {"core", "policy", "overlap", "perf", "kv", "roles", "stats", "lab/sim", "lab/perf"}
NOT_IN_DECIDE = {"torch", "asyncio", "time", "random", "socket", "os", "threading", "subprocess"}

LAZY: dict[str, set[str]] = {
    # `hadal --help` must not wait for torch and the server.
    "cli": {"hadal", "httpx"},
    "commands": {"hadal", "rich"},
    # The module's page contains plotly's script.
    "lab/simulate": {"hadal"},
}
"""Room -> top-level modules that may be imported inside a function. All other imports stand at the top."""

CODE = ("src", "tests", "train", "bench", "evals", "examples")
MAX_FUNCTION_LINES = dict.fromkeys(CODE, 70) | {"bench": 90, "tests": 90}
"""Folder -> maximum lines of a function's body with its docstring; the signature does not count."""
MAX_UNDOCUMENTED_LINES = 8
"""Longest public function or class that needs no docstring."""

# In two pieces, so that this file does not contain the forbidden text.
NOT_IN_TEXT = [
    "/wo" + "rk/",
    "/op" + "t/",
    "/tmp" + "/v",
    "py" + "pi.org",
    "hon" + "hosted.org",
    "torch" + ".org/whl",
]
MAX_TEXT_BYTES = 1_000_000


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def room_of(path: Path) -> str:
    """Return the room of a file: `core` for `src/hadal/core/plans.py`, `cli` for `src/hadal/cli.py`.
    The package's own __init__ belongs to none.
    """
    parts = path.relative_to(SRC).with_suffix("").parts
    return room_in(parts) if parts[-1] != "__init__" or len(parts) > 1 else "__init__"


def room_in(parts: Sequence[str]) -> str:
    """Return the room of a path or a module below `hadal`, given as its parts."""
    if parts[0] in HOUSES and len(parts) > 1 and parts[1] != "__init__":
        return f"{parts[0]}/{parts[1]}"
    return parts[0]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@functools.cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    """Return `tree` and all nodes below, walked once for all tests."""
    return list(ast.walk(tree))


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted module) of every import below `tree`, including those inside functions."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            if node.module == "hadal":  # from hadal import core
                yield from ((node.lineno, f"hadal.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module or ""


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (
        node for node in nodes(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def num_body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or 0) - function.body[0].lineno + 1


def num_lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def fail_on(offenders: list[str]) -> None:
    assert not offenders, "\n" + "\n".join(offenders)


def test_every_room_is_in_the_table() -> None:
    rooms = {room_of(path) for path in python_files("src/hadal")}
    rooms -= {"__init__", "__main__", *HOUSES}
    assert rooms <= MAY_IMPORT.keys(), f"rooms without a row: {rooms - MAY_IMPORT.keys()}"


def test_imports_point_one_way() -> None:
    offenders = []
    for path in python_files("src/hadal"):
        room = room_of(path)
        allowed = {room} | MAY_IMPORT.get(room, set())
        for line, module in imports(parse(path)):
            parts = module.split(".")
            if parts[0] in {"bench", "tests", "train", "evals"}:
                offenders.append(f"{name(path)}:{line}: the package imports {module}")
            if (
                parts[0] == "hadal"
                and len(parts) > 1
                and room_in(parts[1:]) not in allowed
                and not parts[1].startswith("__")
            ):
                offenders.append(f"{name(path)}:{line}: {room} imports {module}")
    fail_on(offenders)


def test_the_gateway_s_rooms_import_one_way() -> None:
    gateway = SRC / "gateway"
    offenders = []
    for path in python_files("src/hadal/gateway"):
        room = _gateway_room(path.relative_to(gateway).with_suffix("").parts)
        for line, module in imports(parse(path)):
            parts = module.split(".")
            if parts[:2] == ["hadal", "gateway"] and len(parts) > 2:
                other = _gateway_room(parts[2:])
                if other not in {room} | GATEWAY_MAY_IMPORT[room]:
                    offenders.append(f"{name(path)}:{line}: {room} imports {module}")
    fail_on(offenders)


def _gateway_room(parts: Sequence[str]) -> str:
    return parts[0] if parts[0] in GATEWAY_MAY_IMPORT else ""


def test_deciding_code_touches_no_clock_no_io_and_no_torch() -> None:
    fail_on(
        [
            f"{name(path)}:{line}: imports {module}"
            for path in python_files("src/hadal")
            if room_of(path) in DECIDE
            for line, module in imports(parse(path))
            if module.split(".")[0] in NOT_IN_DECIDE
        ]
    )


def test_imports_stand_at_the_top() -> None:
    offenders = []
    for path in python_files("src/hadal"):
        allowed = LAZY.get(room_of(path), set())
        for function in functions(parse(path)):
            for line, module in imports(function):
                if module.split(".")[0] not in allowed:
                    offenders.append(f"{name(path)}:{line}: {function.name} imports {module}")
    fail_on(offenders)


def test_the_lender_alone_knows_ray() -> None:
    """The node provider is a process of its own, so that serving processes do not communicate through Ray."""
    provider = SRC / "runtime" / "ray_cluster.py"
    fail_on(
        [
            f"{name(path)}:{line}: imports {module}"
            for path in python_files("src/hadal")
            if path != provider
            for line, module in imports(parse(path))
            if module.split(".")[0] == "ray" or module == "hadal.runtime.ray_cluster"
        ]
    )


def test_the_console_alone_knows_nicegui() -> None:
    """The console is a process of its own, so that no other process waits for its imports."""
    fail_on(
        [
            f"{name(path)}:{line}: imports {module}"
            for path in python_files("src/hadal")
            if room_of(path) not in ("apps/console", "commands")
            for line, module in imports(parse(path))
            if module.split(".")[0] in ("nicegui", "fastapi")
            or module.startswith("hadal.apps.console")
        ]
    )


def test_functions_are_short() -> None:
    fail_on(
        [
            f"{name(path)}:{function.lineno}: {function.name} has {num_body_lines(function)} lines"
            for folder, limit in MAX_FUNCTION_LINES.items()
            for path in python_files(folder)
            for function in functions(parse(path))
            if num_body_lines(function) > limit
        ]
    )


def test_every_module_says_what_it_is() -> None:
    files = [path for path in python_files(*CODE) if path.read_text(encoding="utf-8").strip()]
    fail_on([name(path) for path in files if not ast.get_docstring(parse(path))])


def test_public_things_say_what_they_are() -> None:
    """Checks classes and functions too long to understand at a glance. Enums are exempt: their
    members explain them.
    """
    offenders = []
    for path in python_files("src/hadal"):
        for node in parse(path).body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            is_enum = isinstance(node, ast.ClassDef) and any(
                "Enum" in ast.unparse(base) for base in node.bases
            )
            is_short = num_lines(node) <= MAX_UNDOCUMENTED_LINES
            if not (node.name.startswith("_") or is_enum or is_short or ast.get_docstring(node)):
                offenders.append(f"{name(path)}:{node.lineno}: {node.name} has no docstring")
    fail_on(offenders)


def test_errors_are_not_swallowed() -> None:
    offenders = []
    for path in python_files(*CODE):
        for node in nodes(parse(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            catches_all = node.type is None or ast.unparse(node.type) in {
                "Exception",
                "BaseException",
            }
            if catches_all and all(
                isinstance(statement, ast.Pass | ast.Continue) for statement in node.body
            ):
                offenders.append(f"{name(path)}:{node.lineno}: catches everything and says nothing")
    fail_on(offenders)


def tracked_files() -> list[Path]:
    """Return the files that a commit would contain. Skips the test outside a git checkout."""
    found = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if found.returncode != 0:
        pytest.skip("not a git checkout")
    files = [ROOT / entry for entry in found.stdout.decode().split("\0") if entry]
    return [path for path in files if path.is_file() and path.stat().st_size <= MAX_TEXT_BYTES]


def test_no_path_of_a_machine_and_no_registry() -> None:
    offenders = []
    for path in tracked_files():
        content = path.read_bytes()
        if b"\0" in content:
            continue  # Not text.
        for number, line in enumerate(content.decode("utf-8", errors="replace").splitlines(), 1):
            offenders += [
                f"{name(path)}:{number}: {pattern}" for pattern in NOT_IN_TEXT if pattern in line
            ]
    fail_on(offenders)


def test_unit_tests_mirror_the_source() -> None:
    folders = {path.parent for path in python_files("tests/unit")} - {ROOT / "tests" / "unit"}
    here = ROOT / "tests" / "unit"
    strangers = [one for one in folders if not (SRC / one.relative_to(here)).is_dir()]
    fail_on([f"{name(folder)}: no such room" for folder in strangers])


def test_deciding_and_connecting_code_loads_no_torch() -> None:
    """Indirect imports count too: a simulation runs without torch, and a gateway starts without
    waiting for it.
    """
    modules = [
        ".".join(path.relative_to(SRC.parent).with_suffix("").parts)
        for path in python_files("src/hadal")
        if room_of(path) in DECIDE and path.name != "__init__.py"
    ]
    modules += [
        "hadal.cli",
        "hadal.gateway.process",
        "hadal.runtime.launch",
        "hadal.runtime.resolve",
    ]
    code = f"import sys\nfor name in {modules}: __import__(name)\nassert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT / "src", capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_folder_of_tests_is_collected(pytestconfig: pytest.Config) -> None:
    """pytest's default list of skipped folders contains `dist`, which is one of ours."""
    skipped = set(pytestconfig.getini("norecursedirs"))
    folders = {
        path.name
        for path in (ROOT / "tests").rglob("*")
        if path.is_dir() and path.name[0].isalpha()
    }
    assert "dist" in folders
    assert skipped.isdisjoint(folders)


def test_ruff_looks_at_every_folder() -> None:
    """Ruff's default list of skipped folders contains `dist`, which is one of ours."""
    found = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--show-files", "tests"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    seen = set(found.stdout.split())
    fail_on([name(path) for path in python_files("tests") if str(path) not in seen])


def test_no_class_name_stands_twice() -> None:
    """A name means one class, for readers and searches; a leading underscore makes no difference."""
    name_to_places: dict[str, list[str]] = {}
    for path in sorted(SRC.rglob("*.py")):
        for node in nodes(parse(path)):
            if isinstance(node, ast.ClassDef):
                places = name_to_places.setdefault(node.name.lstrip("_"), [])
                places.append(f"{name(path)}:{node.lineno}")
    fail_on([f"{each}: {', '.join(at)}" for each, at in name_to_places.items() if len(at) > 1])


CLOCKS = {
    "time": {"time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
    "timeit": {"timeit", "repeat", "default_timer"},
}
"""Module or class -> functions that read a clock, also with the suffix `_ns`."""
READS_CLOCKS = {"tests/waiting.py", "tests/dist/gate.py", "tests/dist/link.py"}
"""Files that may read a clock: the waits, the gate, which opens after a limit, and a slow link. The
suite's tools (TOOLS) may too, because they print durations.
"""
TOOLS = ("tests/suite/", "tests/mutants", "tests/clients/__main__.py", "tests/sim/swarm.py")
GIVEN = {"deadline", "unix_now"}
"""Functions of tests/waiting.py that return a time for other code; tests must not compare it."""


def clock_reads(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, code) of every call that reads a clock, including `loop.time()` and `reply.elapsed`."""
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and node.attr == "elapsed":
            yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.ImportFrom) and node.module in CLOCKS:
            names = {alias.name.removesuffix("_ns") for alias in node.names}
            if names & CLOCKS[node.module]:
                yield node.lineno, ast.unparse(node)
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner = ast.unparse(node.func.value).rpartition(".")[2]
        is_clock = node.func.attr.removesuffix("_ns") in CLOCKS.get(owner, set())
        is_loop = node.func.attr == "time" and not node.args and owner != "time"
        if is_clock or is_loop:
            yield node.lineno, ast.unparse(node)


def test_tests_read_no_clock() -> None:
    """A verdict that depends on a time depends on the machine's load. Tests wait with
    `tests.waiting`, assert order and outcome, and leave times to simulations and to `bench`.
    """
    fail_on(
        [
            f"{name(path)}:{line}: {code}"
            for path in python_files("tests")
            if name(path) not in READS_CLOCKS and not name(path).startswith(TOOLS)
            for line, code in clock_reads(parse(path))
        ]
    )


def test_times_that_tests_hand_on_are_not_compared() -> None:
    offenders = []
    for path in python_files("tests"):
        for function in functions(parse(path)):
            given = {
                target.id
                for node in nodes(function)
                if isinstance(node, ast.Assign) and is_given(node.value, set())
                for target in node.targets
                if isinstance(target, ast.Name)
            }
            offenders += [
                f"{name(path)}:{node.lineno}: {ast.unparse(node)}"
                for node in nodes(function)
                if isinstance(node, ast.Compare)
                and not any(isinstance(one, ast.Is | ast.IsNot) for one in node.ops)
                and any(is_given(side, given) for side in (node.left, *node.comparators))
            ]
    fail_on(offenders)


def is_given(value: ast.expr, names: set[str]) -> bool:
    """Return whether a value is a time from tests/waiting.py, or a sum with one."""
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in GIVEN
    if isinstance(value, ast.BinOp):
        return is_given(value.left, names) or is_given(value.right, names)
    return isinstance(value, ast.Name) and value.id in names
