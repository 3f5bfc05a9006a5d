"""Tables of a file as dataclasses: what is said, what is not, and what cannot be."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hadal.core.config import build, read_toml
from hadal.core.errors import ConfigError


@dataclass(frozen=True)
class Inner:
    size: int = 1
    is_on: bool = False


@dataclass(frozen=True)
class Needed:
    size: int


@dataclass(frozen=True)
class Outer:
    name: str = ""
    share: float = 0.5
    shares: tuple[float, ...] = ()
    inner: Inner = field(default_factory=Inner)
    needed: tuple[Needed, ...] = ()


def test_what_is_not_said_has_its_default() -> None:
    assert build(Outer, {"inner": {"size": 3}}, "f") == Outer(inner=Inner(3))


def test_whole_numbers_are_numbers_and_arrays_are_tuples() -> None:
    assert build(Outer, {"share": 1, "shares": [1, 0.5]}, "f") == Outer(
        share=1.0, shares=(1.0, 0.5)
    )


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"nam": "x"}, "unknown field 'nam'"),
        ({"share": "x"}, "type float"),
        ({"share": True}, "type float"),
        ({"shares": 1.0}, "an array"),
        ({"shares": ["x"]}, "type float"),
        ({"needed": [{}]}, "f: needed: size is missing"),
        ({"inner": 1}, "must be a table"),
        ({"inner": {"size": True}}, "f: inner: size is True"),
        ({"inner": {"is_on": 1}}, "type bool"),
        ({"inner": {"size": 1.5}}, "type int"),
    ],
)
def test_what_cannot_be_is_named(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build(Outer, fields, "f")


def test_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such study file"):
        read_toml(tmp_path / "none.toml", "study")
    (tmp_path / "bad.toml").write_text("a = ")
    with pytest.raises(ConfigError, match="not a TOML file"):
        read_toml(tmp_path / "bad.toml", "study")
