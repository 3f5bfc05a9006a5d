"""`python -m evals`: useful help, and errors of one line."""

import pytest
from rich.text import Text
from typer.main import get_command
from typer.testing import CliRunner

from evals.__main__ import app


def test_it_explains_itself_on_a_terminal_of_80_columns() -> None:
    result = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80", "NO_COLOR": "1"})
    shown = [line.strip() for line in result.output.splitlines()]
    lines = [line.strip() for line in Text.from_markup(get_command(app).epilog).plain.splitlines()]
    assert len(lines) >= 4
    assert [line for line in lines if line not in shown] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--url", "http://127.0.0.1:99999"], "--url is 'http://127.0.0.1:99999'"),
        (["--url", "http://127.0.0.1:9", "--num-per-task", "1"], "Is there a server?"),
        (["--task", "nope"], "unknown task 'nope'; known: arithmetic"),
    ],
)
def test_what_cannot_be_asked_is_one_line(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1
