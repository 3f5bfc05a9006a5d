"""The commands: useful help, errors of one line, options that override the file."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest
from rich.text import Text
from typer.main import get_command
from typer.testing import CliRunner

from hadal import __version__
from hadal.cli import app
from hadal.commands.serve import _api_keys, _deployment
from hadal.core.config import CacheConfig, Deployment, GatewayConfig, read_deployment
from hadal.core.errors import ConfigError
from tests.needs import leave_out
from tests.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in a process of its own."""
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT / "src", capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"hadal {__version__}\n"


@pytest.mark.parametrize("words", [["chat"], ["trace"], ["console", "--port", "0"]])
def test_an_address_that_is_none_is_one_line(words: list[str]) -> None:
    result = CliRunner().invoke(app, [*words, "--url", "foo"])
    assert result.exit_code == 2
    assert result.stderr == (
        "hadal: --url is 'foo'; use an address such as http://127.0.0.1:8000.\n"
    )


@pytest.mark.promise("Each command has --help with examples")
@pytest.mark.parametrize(
    "command", sorted(command.name or "" for command in get_command(app).commands.values())
)
def test_examples_stay_whole_on_a_terminal_of_80_columns(command: str) -> None:
    epilog = get_command(app).commands[command].epilog
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80", "NO_COLOR": "1"})
    shown = [line.strip() for line in result.output.splitlines()]
    blocks = Text.from_markup(epilog).plain.split("\n\n")[1:]
    lines = [line.strip() for block in blocks for line in block.splitlines() if "\n" in block]
    assert len(lines) >= 4
    assert [line for line in lines if line not in shown] == []


def test_help_breaks_where_the_terminal_does() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80", "NO_COLOR": "1"}).output
    for command in get_command(app).commands.values():
        assert command.help
        assert "\n" not in command.help
    assert not any(line.strip("│ ") in ("after", "of the ledger.") for line in shown.splitlines())


TYPED = {
    "bash": (
        "COMP_WORDS=(hadal serve --cache-f); COMP_CWORD=2; _hadal_completion hadal; echo"
        ' "${COMPREPLY[@]}"'
    ),
    # Print the choices that zsh gets, instead of its menu.
    "zsh": (
        "compdef() { :; }; _arguments() { echo $@; }; words=(hadal serve --cache-f); CURRENT=3\n"
        "_hadal_completion"
    ),
    "fish": "complete --do-complete 'hadal serve --cache-f'",
}
"""Code that presses Tab after `hadal serve --cache-f` in each shell."""


@pytest.mark.promise("hadal completion bash prints a script for Tab completion.")
@pytest.mark.parametrize("shell", sorted(TYPED))
def test_a_shell_learns_to_complete(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        leave_out(f"no {shell}", f"apt-get install {shell}")
    script = CliRunner().invoke(app, ["completion", shell]).output
    (tmp_path / "hadal").write_text(f"#!{sys.executable}\nfrom hadal.cli import app\n\napp()\n")
    (tmp_path / "hadal").chmod(0o755)
    lines = [script, TYPED[shell]]
    if shell == "zsh":
        stub, typed = TYPED[shell].split("; words", 1)
        lines = [stub, script, f"words{typed}"]
    done = subprocess.run(
        [shell, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
        env={
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "XDG_CONFIG_HOME": str(tmp_path),
        },
    )
    assert "--cache-folder" in done.stdout, done.stderr
    assert "--cache-mb" not in done.stdout


def test_help_loads_neither_torch_nor_the_server() -> None:
    code = (
        "import sys\nfrom hadal.cli import app\n"
        "try: app(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'zmq', 'uvicorn', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "/no/such/folder"], "/no/such/folder: no such folder"),
        (["--config", "/no/such.toml"], "no such deployment file"),
        (["--port", "99999"], "port is 99999"),
        (["--log-level", "loud"], "--log-level is 'loud'"),
        (["--log-format", "xml"], "--log-format is 'xml'"),
        (["--api-key", "a,b"], "comma"),
        (["--cache-folder", __file__], "is not a folder"),
        (["--api-keys-file", "/no/such/keys"], "/no/such/keys"),
        (["--config", "bad_batches.toml"], "batches.url: "),
        (["--config", "batches_of_a_cluster.toml"], "Set batches.url to postgresql://"),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], words: str, dry: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad_batches.toml").write_text('[batches]\nurl = "mysql://x"\n')
    Path("batches_of_a_cluster.toml").write_text(
        'host = "0.0.0.0"\n[cluster]\non = "ray"\n[gateway]\nnodes = 2\n[ledger]\nurl = "off"\n'
        '[batches]\nurl = "/x.sqlite"\n'
    )
    result = CliRunner().invoke(app, ["serve", *arguments, *(["--dry-run"] if dry else [])])
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_mistake_is_a_line_of_a_json_log() -> None:
    done = python("-m", "hadal.cli", "serve", "--log-format", "json", "--port", "99999")
    line = json.loads(done.stderr)
    assert (done.returncode, line["process"], line["level"]) == (2, "supervisor", "critical")
    assert "port is 99999" in line["message"]


@pytest.mark.promise("what would run where, in how much memory; starts nothing")
def test_a_dry_run_prints_the_plan_and_starts_nothing() -> None:
    result = CliRunner().invoke(
        app, ["serve", "--config", str(ROOT / "configs" / "laptop_ep.toml"), "--dry-run"]
    )
    assert result.exit_code == 0
    assert "decode-0" in result.stdout
    assert "this host can run it" in result.stdout
    assert "\x1b[" not in result.stdout, "plain where it is not a terminal"


def test_a_plan_for_many_nodes_is_sound_though_it_cannot_run_here() -> None:
    config = str(ROOT / "configs" / "v3_ep32_ep144.toml")
    result = CliRunner().invoke(app, ["serve", "--config", config, "--dry-run"])
    assert result.exit_code == 0
    assert "cannot run on this host: it needs 30 nodes" in result.stdout
    served = CliRunner().invoke(app, ["serve", "--config", config])
    assert served.exit_code == 2
    assert "it needs 30 nodes" in served.stderr


def test_a_dry_run_says_what_serving_would_refuse(tmp_path: Path) -> None:
    large = tmp_path / "large.toml"
    large.write_text("[decode]\nkv_blocks = 100_000_000\n")
    for options in (["--config", str(large)], ["--model", str(ROOT / "configs" / "deepseek_v3")]):
        dry = CliRunner().invoke(app, ["serve", *options, "--dry-run"])
        assert dry.exit_code == 0
        assert "cannot run on this host" in dry.stdout, dry.stdout
        assert CliRunner().invoke(app, ["serve", *options]).exit_code == 2


@pytest.mark.parametrize("path", ["/no/such/folder/x.gz", "/"])
def test_frames_that_cannot_be_written_are_one_line(path: str) -> None:
    result = CliRunner().invoke(app, ["simulate", "--frames", path])
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_plan_that_is_wrong_ends_a_dry_run_with_2(tmp_path: Path) -> None:
    file = tmp_path / "d.toml"
    file.write_text("[decode]\nranks = 3\n")
    result = CliRunner().invoke(app, ["serve", "--config", str(file), "--dry-run"])
    assert result.exit_code == 2
    assert "Set decode.redundant_experts to 2" in result.stderr


def test_options_go_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "d.toml"
    file.write_text('port = 9000\nhost = "0.0.0.0"\n[decode]\nmax_requests = 3\n')
    deployment = _deployment(file, {"port": 9001, "host": None})
    assert (deployment.port, deployment.host) == (9001, "0.0.0.0")
    assert deployment.decode.max_requests == 3
    assert _deployment(None, {"port": 9001, "host": None}) == Deployment(port=9001)


def test_the_cache_s_options_go_before_its_table(tmp_path: Path) -> None:
    file = tmp_path / "d.toml"
    file.write_text('[cache]\nmemory = "off"\nfolder = "there"\ndisk_mb = 5\n')
    for path, folder, disk_mb, found in (
        (file, None, 6, CacheConfig("off", "there", 6)),
        (file, "", None, CacheConfig("off", "", 5)),
        (None, "here", None, CacheConfig(folder="here")),
    ):
        options = {"cache": {"folder": folder, "disk_mb": disk_mb}}
        assert _deployment(path, {}, options).cache == found


def test_the_number_of_gateways_is_an_option() -> None:
    assert _deployment(None, {}, {"gateway": {"processes": 2}}).gateway == GatewayConfig(
        processes=2
    )
    assert _deployment(None, {}, {"gateway": {"processes": None}}) == Deployment()
    result = CliRunner().invoke(app, ["serve", "--gateways", "0"])
    assert result.exit_code == 2


def test_a_dry_run_shows_the_cache(tmp_path: Path) -> None:
    options = ["--cache-folder", str(tmp_path / "kv"), "--cache-mb", "100"]
    result = CliRunner().invoke(app, ["serve", "--dry-run", *options])
    assert result.exit_code == 0
    assert f"up to 0.1 GB in {tmp_path / 'kv'}" in result.stdout
    assert "KV transfer" in result.stdout


def test_the_laptops_file_shows_the_defaults() -> None:
    path = ROOT / "configs" / "laptop.toml"
    assert read_deployment(path) == Deployment()
    written, every = tomllib.loads(path.read_text()), msgspec.to_builtins(Deployment())
    for name in ("drafts", "tenant_promise"):
        del every["prefill"][name]  # Prefill drafts nothing and computes all prompts of a step.
    for name, value in every.items():
        assert name in written, name
        if isinstance(value, dict):
            assert set(value) == set(written[name]), name


@pytest.mark.promise("API keys come from a file (--api-keys-file keys.txt, one a line, chmod 600")
def test_keys_come_from_a_file_that_is_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HADAL_API_KEYS", raising=False)
    path = tmp_path / "keys"
    path.write_text("# for tests\none\n\n  two priority  \n")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        _api_keys([], path)
    path.chmod(0o600)
    assert _api_keys(["zero"], path) == ("zero", "one", "two priority")
    for text, reason in (
        ("# none\n", "no key"),
        ("a,b\n", "comma"),
        ("a\n#\nb c\n", "line 3: an unknown word follows the key"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=reason):
            _api_keys([], path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        _api_keys([], path)
    with pytest.raises(ConfigError, match="cannot be read"):
        _api_keys([], tmp_path / "absent")


def test_keys_come_from_options_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HADAL_API_KEYS", "b, c,,a")
    assert _api_keys(["a"]) == ("a", "b", "c")
    with pytest.raises(ConfigError):
        _api_keys(["a,b"])
    with pytest.raises(ConfigError, match="empty"):
        _api_keys([" "])


@pytest.mark.parametrize("command", [("serve",), ("serve", "--dry-run"), ("console",)])
def test_a_network_is_served_without_keys_only_by_a_flag_that_says_so(
    command: tuple[str, ...],
) -> None:
    refused = CliRunner().invoke(app, [*command, "--host", "0.0.0.0"])
    assert refused.exit_code == 2
    assert "--open-to-network" in refused.stderr
    planned = CliRunner().invoke(
        app, ["serve", "--dry-run", "--host", "0.0.0.0", "--open-to-network"]
    )
    assert planned.exit_code == 0, planned.stderr
