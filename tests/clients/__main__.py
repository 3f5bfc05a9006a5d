"""Try other projects' clients and test suites with a Hadal server.

    python -m tests.clients                       # starts hadal-tiny, tries everything, prints the table
    python -m tests.clients --only openai --url http://127.0.0.1:8000
    python -m tests.clients --write               # and writes docs/clients.md
    python -m tests.clients --only agents         # the newest coding agents (tests/clients/agents)

Each client gets an environment of its own in .peers/clients/, since some need old versions of
others' packages. Packages come from PyPI and npm; a client that cannot be installed gets a row with
the reason. The scripts in python/ and js/ are ours. The suites are others': llm-comply, LangChain's
standard tests of chat models, and the tests of openai-python's API resources, from its source
distribution. Coding agents have a table of their own.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from bench.server import launched, wait_ready
from tests.clients.agents import table
from tests.clients.installs import Missing, called, found, install, install_python

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENVIRONMENTS = ROOT / ".peers" / "clients"
DOCUMENT = ROOT / "docs" / "clients.md"
START_TIMEOUT_S = 600.0

OPENAI = "openai==2.54.0"
PYTHON: dict[str, tuple[str, ...]] = {
    "openai": (OPENAI,),
    "anthropic": ("anthropic==2.14.0",),
    "langchain": (
        "langchain==1.5.2",
        "langchain-openai==1.7.4",
        "langchain-deepseek==1.1.1",
        "langchain-anthropic==1.7.10",
    ),
    # anthropic 2 moved to another HTTP library, which pydantic-ai does not support yet.
    "pydantic": ("pydantic-ai-slim[openai,anthropic]==2.68.0", "anthropic==1.17.0"),
    "llama_index": (
        "llama-index-core==0.14.25",
        "llama-index-llms-openai-like==0.8.1",
        "llama-index-llms-deepseek==0.4.1",
    ),
    "openai_agents": ("openai-agents==0.20.0", "instructor==1.17.0"),
}
"""Name of a script in python/ without `_client.py` -> packages that it needs."""
NPM = (
    "ai@6.0.326",
    "@ai-sdk/deepseek@2.0.69",
    "@ai-sdk/openai-compatible@2.0.92",
    "@ai-sdk/openai@3.0.141",
    "@ai-sdk/anthropic@3.0.140",
    "openai@6.49.0",
    "zod@4.6.7",
)
COMPLY = "llm-comply==0.5.0"
COMPLY_FORMATS = {
    "openai-chat": (),
    "open-responses": (),
    "anthropic": ("--auth-header", "x-api-key", "--no-bearer"),
}
RESOURCE_TESTS = (
    "tests/api_resources/test_models.py",
    "tests/api_resources/chat/test_completions.py",
    "tests/api_resources/test_completions.py",
    "tests/api_resources/test_responses.py",
    "tests/api_resources/test_files.py",
    "tests/api_resources/test_batches.py",
)
STANDARD = (
    "langchain-tests==1.1.9",
    "langchain-core==1.8.3",
    "langchain-openai==1.7.4",
    "langchain-deepseek==1.1.1",
    "langchain-anthropic==1.7.10",
)
STANDARD_SETTINGS = """\
[pytest]
asyncio_mode = auto
asyncio_default_test_loop_scope = session
"""
"""One event loop for all tests: the clients keep connections from test to test."""
CLIENTS = (*PYTHON, "js", "comply", "standard", "resources")
AGENTS = "agents"
HEAD = """\
# Compatibility with clients

For developers of clients who want to know which libraries work with a server. Each table lists what was tried with one
client or test suite, and what it received.

## To try the clients

```sh
python -m tests.clients                       # starts hadal-tiny, tries everything, prints the table
python -m tests.clients --only openai --url http://127.0.0.1:8000
python -m tests.clients --write               # writes this page, too
```

Each client has an environment of its own ([tests/clients](../tests/clients/__main__.py)). The scripts are part
of Hadal; the suites (llm-comply, langchain-tests, openai-python's tests) are third-party. The tests of openai-python
use every field of OpenAI's API, and Hadal does not serve some of them (audio, images, stored chats). LangChain's tests
ask what hadal-tiny was not taught. Coding agents are in [agents](agents.md)."""
"""Text of docs/clients.md above its tables."""


@dataclass(frozen=True)
class Trial:
    """One row: the result of one thing tried with a client."""

    client: str
    what: str
    ok: bool
    seen: str


def _python(name: str, *packages: str) -> Path:
    """Return the Python of an environment with these packages; make it if it is missing or differs."""
    folder = ENVIRONMENTS / name
    stamp = folder / "packages"
    if not stamp.is_file() or stamp.read_text() != "\n".join(packages):
        install_python(folder, *packages)
        stamp.write_text("\n".join(packages))
    return folder / "bin" / "python"


def _trials(client: str, lines: str, errors: str) -> list[Trial]:
    """Return the rows that a script printed, or one row with its errors if it printed none."""
    trials = [
        Trial(**json.loads(line)) for line in lines.splitlines() if line.startswith('{"client"')
    ]
    if not trials:
        trials = [Trial(client, "starts", False, " ".join(errors.split())[-200:])]
    return trials


def _scripts(name: str, url: str, model: str) -> list[Trial]:
    python = _python(name, *PYTHON[name])
    script = HERE / "python" / f"{name}_client.py"
    _, lines, errors = called(python, script, HADAL_URL=url, HADAL_MODEL=model)
    return _trials(name, lines, errors)


def _javascript(url: str, model: str) -> list[Trial]:
    npm = found("npm", "apt-get install npm")
    folder = ENVIRONMENTS / "js"
    stamp = folder / "packages"
    folder.mkdir(parents=True, exist_ok=True)
    if not stamp.is_file() or stamp.read_text() != "\n".join(NPM):
        (folder / "package.json").write_text(
            '{"name": "clients", "private": true, "type": "module"}'
        )
        install(npm, "install", "--silent", "--no-audit", "--no-fund", *NPM, cwd=folder)
        stamp.write_text("\n".join(NPM))
    shutil.copy(HERE / "js" / "trials.mjs", folder)
    place = {"HADAL_URL": url, "HADAL_MODEL": model}
    _, lines, errors = called("node", "trials.mjs", cwd=folder, **place)
    return _trials("js", lines, errors)


def _comply(url: str, model: str) -> list[Trial]:
    """Return llm-comply's own verdicts, one row per test; skipped tests have no row."""
    python = _python("comply", COMPLY)
    trials = []
    for name, options in COMPLY_FORMATS.items():
        command = [python.parent / "llm-comply", "-u", f"{url}/v1", "-k", "none", "-m", model]
        command += ["--format", name, *options, "--json"]
        _, output, errors = called(*command)
        client = f"{COMPLY.replace('==', ' ')}, {name}"
        try:
            results = json.loads(output[output.index("{") :])["results"]
        except (ValueError, KeyError):
            trials.append(Trial(client, "runs", False, (errors or output)[-200:]))
            continue
        for result in results:
            if result["status"] != "skipped":
                seen = (
                    "; ".join(result.get("errors") or result.get("warnings") or [])
                    or "as its specification says"
                )
                trials.append(
                    Trial(client, result["name"], result["status"] == "passed", seen[:200])
                )
    return trials


def _standard(url: str, model: str) -> list[Trial]:
    """Run LangChain's standard tests of chat models; one row per client."""
    python = _python("standard", *STANDARD)
    # In a folder with settings of its own, so that pytest does not read those of this repository.
    folder = python.parents[1] / "suite"
    folder.mkdir(exist_ok=True)
    (folder / "pytest.ini").write_text(STANDARD_SETTINGS)
    for name in ("standard_tests.py", "trial.py"):
        shutil.copy(HERE / "python" / name, folder)
    command = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rA", "--tb=line")
    place = {"HADAL_URL": url, "HADAL_MODEL": model}
    _, output, errors = called(*command, "standard_tests.py", cwd=folder, **place)
    client = STANDARD[0].replace("==", " ")
    trials = []
    for name in dict.fromkeys(re.findall(r"^(?:PASSED|FAILED) \S+::Test(\w+)::", output, re.M)):
        passed = len(re.findall(rf"^PASSED \S+::Test{name}::", output, re.M))
        failed = re.findall(rf"^FAILED \S+::Test{name}::test_(\w+)", output, re.M)
        trials.append(Trial(client, name, not failed, _passed_and_failed(passed, failed)))
    return trials or [Trial(client, "runs", False, (errors or output)[-200:])]


def _passed_and_failed(num_passed: int, failed: list[str]) -> str:
    names = f"; not: {', '.join(sorted(set(failed)))}" if failed else ""
    return f"{num_passed} passed{names}"


def _resources(url: str, model: str) -> list[Trial]:
    """Run openai-python's tests of its API resources with our model; one row per test function.

    They try every field of the API; some are not served (audio, images, stored chats). The row
    names the failed ones.
    """
    python = _python(
        "resources", OPENAI, "pytest", "pytest-asyncio", "pytest-xdist", "respx", "rich"
    )
    folder = ENVIRONMENTS / "resources-source"
    source = folder / OPENAI.replace("==", "-")
    if not source.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
        install(*download, "--no-binary", ":all:", "-d", folder, OPENAI)
        with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
    trials = []
    for name in RESOURCE_TESTS:
        path = source / name
        path.write_text(re.sub(r'"gpt-[^"]+"', f'"{model}"', path.read_text()))
        options = ("-q", "-n", "0", "-p", "no:cacheprovider", "-rA", "--tb=line")
        command = (python, "-m", "pytest", name, *options)
        _, output, errors = called(*command, cwd=source, TEST_API_BASE_URL=f"{url}/v1")
        passed = len(re.findall(r"^PASSED ", output, re.M))
        failed = re.findall(
            r"^FAILED \S+::test_(?:(?:method|raw_response|streaming_response)_)?(\w+)", output, re.M
        )
        seen = _passed_and_failed(passed, failed)
        if not passed and not failed:
            failed, seen = ["runs"], (errors or output)[-200:]
        what = name.removeprefix("tests/api_resources/").removesuffix(".py")
        trials.append(Trial("openai-python's own tests", what, not failed, seen))
    return trials


def tried(name: str, url: str, model: str) -> list[Trial]:
    """Return all rows of one client or suite."""
    try:
        if name == "js":
            return _javascript(url, model)
        if name == "comply":
            return _comply(url, model)
        if name == "standard":
            return _standard(url, model)
        if name == "resources":
            return _resources(url, model)
        return _scripts(name, url, model)
    except Missing as missing:
        return [Trial(name, "installs", False, str(missing))]


@contextmanager
def served() -> Iterator[str]:
    """Serve hadal-tiny as `hadal serve` starts it, on a free port; yield its URL."""
    with launched() as server:
        wait_ready(server, START_TIMEOUT_S)
        yield "http://{}:{}".format(*server.address)


def as_markdown(trials: list[Trial]) -> str:
    """Return docs/clients.md: HEAD, and a table for each client."""
    lines = [HEAD]
    for client in dict.fromkeys(trial.client for trial in trials):
        lines += ["", f"## {client}", "", "| Tried | | Seen |", "| --- | --- | --- |"]
        for trial in trials:
            if trial.client == client:
                seen = trial.seen.replace("|", "\\|").replace("`", "'").replace("<", "&lt;")
                lines.append(f"| {trial.what} | {'works' if trial.ok else '**fails**'} | {seen} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="of a running server, without /v1; otherwise one is started")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=(*CLIENTS, AGENTS),
        default=(*CLIENTS, AGENTS),
        metavar="CLIENT",
        help=", ".join((*CLIENTS, AGENTS)),
    )
    parser.add_argument("--write", action="store_true", help="write docs/clients.md")
    arguments = parser.parse_args()
    console = Console()
    names = [name for name in arguments.only if name != AGENTS]
    if names:
        try_clients(console, names, arguments.url, is_written=arguments.write)
    if AGENTS in arguments.only and arguments.url is None:
        table.shown(console, list(table.AGENTS), is_newest=True, keep=None)


def try_clients(console: Console, names: list[str], url: str | None, *, is_written: bool) -> None:
    """Try these clients with the server at `url` (None: one is started) and print their table."""
    trials: list[Trial] = []
    given = nullcontext((url or "").rstrip("/").removesuffix("/v1"))
    with served() if url is None else given as url:
        model = httpx.get(f"{url}/v1/models", timeout=600).json()["data"][0]["id"]
        for name in names:
            with console.status(f"{name} (the first time, it is installed) ..."):
                found = tried(name, url, model)
            trials += found
            rows = Table("client", "tried", "", "seen", show_header=name == names[0])
            for trial in found:
                mark = "[green]works[/]" if trial.ok else "[red]fails[/]"
                rows.add_row(trial.client, trial.what, mark, trial.seen[:100].replace("[", "\\["))
            console.print(rows)
    num_ok = sum(trial.ok for trial in trials)
    console.print(f"{num_ok} of {len(trials)} work")
    if is_written:
        DOCUMENT.write_text(as_markdown(trials))


if __name__ == "__main__":
    main()
