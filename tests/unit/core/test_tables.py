"""A file's tables as frozen values: given, missing and invalid fields."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from hadal.core.config import read_toml
from hadal.core.documents import converted
from hadal.core.errors import ConfigError


class Inner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: int = 1
    is_on: bool = False


class Needed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: int


class Outer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str = ""
    share: float = 0.5
    shares: tuple[float, ...] = ()
    inner: Inner = Inner()
    needed: tuple[Needed, ...] = ()


def test_what_is_not_said_has_its_default() -> None:
    assert converted({"inner": {"size": 3}}, Outer, "f") == Outer(inner=Inner(3))


def test_whole_numbers_are_numbers_and_arrays_are_tuples() -> None:
    found = converted({"share": 1, "shares": [1, 0.5]}, Outer, "f")
    assert found == Outer(share=1.0, shares=(1.0, 0.5))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"nam": "x"}, "f: object contains unknown field `nam`. Known: name, share, "),
        ({"share": "x"}, "f: share is 'x'; expected `float`, got `str`"),
        ({"share": True}, "share is True; expected `float`"),
        ({"shares": 1.0}, "shares is 1.0; expected `array`"),
        ({"shares": ["x"]}, r"f: shares\[0\] is 'x'; expected `float`"),
        ({"needed": [{}]}, r"f: needed\[0\]: object missing required field `size`"),
        ({"inner": 1}, "inner is 1; expected `object`"),
        ({"inner": {"size": True}}, r"f: inner\.size is True; expected `int`"),
        ({"inner": {"is_on": 1}}, "expected `bool`"),
        ({"inner": {"size": 1.5}}, "expected `int`"),
    ],
)
def test_what_cannot_be_is_named(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        converted(fields, Outer, "f")


def test_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such study file"):
        read_toml(tmp_path / "none.toml", "study")
    (tmp_path / "bad.toml").write_text("a = ")
    with pytest.raises(ConfigError, match="not a TOML file"):
        read_toml(tmp_path / "bad.toml", "study")
