"""Test where the ledger is, given the configuration, the environment and the home folder."""

from pathlib import Path

import pytest

from hadal.runtime.ledger.address import LEDGER_VARIABLE, file_of, ledger_url, outbox_of, shown
from hadal.stats.ledger import LedgerError


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv(LEDGER_VARIABLE)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_by_default_it_is_in_the_state_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ledger_url("auto") == f"sqlite:///{home}/.local/state/hadal/ledger.sqlite"
    monkeypatch.setenv("XDG_STATE_HOME", "/var/state")
    assert ledger_url("auto") == "sqlite:////var/state/hadal/ledger.sqlite"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert ledger_url("") == f"sqlite:///{home}/.local/state/hadal/ledger.sqlite"
    assert list(home.iterdir()) == [], "asking makes nothing"


def test_the_environment_says_what_auto_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEDGER_VARIABLE, "/data/l.sqlite")
    assert ledger_url("auto") == "sqlite:////data/l.sqlite"
    assert ledger_url("/other") == "sqlite:////other"
    assert ledger_url("off") == ""
    monkeypatch.setenv(LEDGER_VARIABLE, "off")
    assert ledger_url("auto") == ""


def test_paths_become_absolute(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    for asked in ("l.sqlite", "sqlite:///l.sqlite", "~/l.sqlite", str(home / "l.sqlite")):
        url = ledger_url(asked)
        assert url == f"sqlite:///{home}/l.sqlite"
        assert ledger_url(url) == url
        assert file_of(url) == home / "l.sqlite"
        assert shown(url) == str(home / "l.sqlite")
        assert outbox_of(url) == home / "l.sqlite.outbox"


def test_postgresql_and_its_password(home: Path) -> None:
    url = ledger_url("postgresql://me:s3cret@host/hadal")
    assert url == "postgresql+psycopg://me:s3cret@host/hadal"
    assert ledger_url(url) == url
    assert ledger_url("postgres://me@host/hadal") == "postgresql+psycopg://me@host/hadal"
    assert "s3cret" not in shown(url)
    assert file_of(url) is None
    assert outbox_of(url).parent == home / ".local" / "state" / "hadal"
    assert outbox_of(url) != outbox_of(ledger_url("postgresql://me@host/other"))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("mysql://host/db", "SQLite or PostgreSQL, not in mysql"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("://", "cannot be read"),
    ],
)
def test_what_cannot_be_a_ledger_is_refused(asked: str, words: str) -> None:
    with pytest.raises(LedgerError, match=words):
        ledger_url(asked)
