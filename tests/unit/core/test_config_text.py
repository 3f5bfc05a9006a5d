"""Writing a deployment as text: it is read back equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from hadal.core.config import (
    CacheConfig,
    Deployment,
    FleetConfig,
    UnitsConfig,
    read_deployment,
    to_toml,
)

ROOT = Path(__file__).resolve().parents[3]
MADE = Deployment(
    model_name='a "name" \\ ü',
    chunk_tokens=4096,
    prefill=UnitsConfig(3, ranks=32, redundant_experts=32),
    cache=CacheConfig(memory="off"),
    fleet=FleetConfig(mode="auto", prefill_max=9, decode_tokens_per_s=1.25e6),
)


@pytest.mark.parametrize("made", [Deployment(), MADE], ids=["default", "changed"])
def test_it_is_read_as_it_was(made: Deployment, tmp_path: Path) -> None:
    path = tmp_path / "made.toml"
    path.write_text(
        to_toml(made, ["one line", "", "another"], {"decode.ranks": "why", "port": "why"}), "utf-8"
    )
    assert read_deployment(path) == made


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem
)
def test_those_that_ship_are_read_as_they_were(path: Path, tmp_path: Path) -> None:
    shipped = read_deployment(path)
    again = tmp_path / "again.toml"
    again.write_text(to_toml(shipped), "utf-8")
    assert read_deployment(again) == shipped


def test_only_what_is_not_by_default_is_written_and_what_has_a_note() -> None:
    text = to_toml(MADE, ["why it is so"], {"decode.ranks": "one of them"})
    lines = text.splitlines()
    assert lines[0] == "# why it is so"
    assert "ranks = 1                           # one of them" in lines
    assert "[limits]" not in lines
    assert not any(line.startswith("port") for line in lines)
