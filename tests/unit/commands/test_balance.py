"""`hadal balance`: its input, its output, and printed placements read back by `--current`."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hadal.cli import app
from hadal.commands.placements import cluster_of, loads_of, placement_of
from hadal.core.errors import EXIT_CONFIG


def run(loads: Path, *more: str, ranks: int = 4, slots: int = 6) -> tuple[int, str]:
    sizes = ("--ranks", str(ranks), "--expert-slots", str(slots))
    result = CliRunner().invoke(app, ["balance", "--loads", str(loads), *sizes, *more])
    return result.exit_code, result.output


def written(folder: Path, loads: object) -> Path:
    path = folder / "loads.json"
    path.write_text(json.dumps(loads))
    return path


@pytest.fixture
def loads_file(tmp_path: Path) -> Path:
    loads = np.random.default_rng(1).lognormal(size=(3, 16))
    loads[0] = 0  # A dense layer.
    path = tmp_path / "loads.json.gz"
    path.write_bytes(
        gzip.compress(json.dumps({"tokens_per_expert": loads.tolist()}).encode(), mtime=0)
    )
    return path


@pytest.mark.promise("draw a live unit's steps; place experts for measured loads")
@pytest.mark.parametrize("mode", ["global", "hierarchical", "hybrid", "fast"])
def test_json(loads_file: Path, mode: str) -> None:
    code, output = run(
        loads_file, "--nodes", "2", "--groups", "4", "--mode", mode, "--json", "--weighted"
    )
    assert code == 0
    plan = json.loads(output)
    names = {"physical_to_logical", "split", "balancedness", "moved_replicas", "elapsed_ms"}
    assert set(plan) == names
    assert [sorted(set(row)) for row in plan["physical_to_logical"]] == [list(range(16))] * 3
    assert [len(row) for row in plan["split"]] == [24] * 3
    assert 0 < plan["balancedness"]["worst"] <= plan["balancedness"]["mean"] <= 1


def test_a_printed_placement_is_read_back(loads_file: Path, tmp_path: Path) -> None:
    today = tmp_path / "today.json"
    today.write_text(run(loads_file, "--json")[1])
    code, output = run(loads_file, "--current", str(today), "--max-moves", "2")
    assert code == 0
    assert "before (today)" in output
    assert "replicas move" in output


def test_without_a_current_placement_nothing_is_said_to_move(
    loads_file: Path, tmp_path: Path
) -> None:
    _, output = run(loads_file)
    assert "replicas move." not in " ".join(output.split()).replace(
        "number of replicas to move.", ""
    )
    assert "--current" in output
    _, printed = run(loads_file, "--json")
    assert json.loads(printed)["moved_replicas"] is None
    (tmp_path / "today.json").write_text(printed)
    today = ("--current", str(tmp_path / "today.json"))
    assert "0 replicas move." in run(loads_file, *today)[1]
    assert json.loads(run(loads_file, *today, "--json")[1])["moved_replicas"] == 0


@pytest.mark.parametrize(
    ("width", "last"), [(50, " 128-143 "), (80, " 112-143 "), (200, "after    ")]
)
def test_the_picture_fits_the_terminal(
    tmp_path: Path, width: int, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    path = written(tmp_path, np.random.default_rng(1).lognormal(2, size=(2, 256)).tolist())
    code, output = run(path, ranks=144, slots=2)
    assert code == 0
    assert max(map(len, output.splitlines())) <= width
    rows = output[output.index("tokens by rank") :].splitlines()[1:]
    assert sum(sum(map(row.count, "▁▂▃▄▅▆▇█")) for row in rows) == 2 * 144
    assert last in output


def test_slots_of_all_ranks_together() -> None:
    assert cluster_of(np.ones((1, 16)), 4, 2, 24) == cluster_of(np.ones((1, 16)), 4, 2, 6)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such JSON file"),
        (b"no json", "cannot be read as JSON"),
        (gzip.compress(json.dumps([list(range(99))]).encode(), mtime=0)[:60], "damaged or cut off"),
        (b"\x1f\x8b\x08 but not really", "damaged or cut off"),
        (b"[[1, 2], [3]]", "all rows equally long"),
        (b"[1, 2]", "[layers, experts]"),
        (b'{"loads": [[1]]}', "without tokens_per_expert (it has loads)"),
        (b"[[1, NaN, 2, 3]]", "[0][1] is nan"),
        (b"[[1, 2, -3, 3]]", "the load at [0, 2] is -3"),
        (b"[[1, 2, 3, Infinity]]", "[0][3] is inf"),
        (b"[" * 100_000, "nests deeper"),
    ],
)
def test_a_bad_file_is_one_line_that_says_what_to_do(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    path = tmp_path / "loads.json"
    if content is not None:
        path.write_bytes(content)
    result = CliRunner().invoke(
        app, ["balance", "--loads", str(path), "--ranks", "2", "--expert-slots", "3"]
    )
    assert result.exit_code == EXIT_CONFIG
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "Errno" not in result.stderr


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    code, output = run(tmp_path)
    assert code == EXIT_CONFIG
    assert "not a file" in output
    assert "Errno" not in output


def test_moves_are_counted_from_a_current_placement(loads_file: Path) -> None:
    code, output = run(loads_file, "--max-moves", "3")
    assert code == EXIT_CONFIG
    assert "needs the current placement" in output


def test_help_teaches_with_an_example_that_works(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["balance", "--help"], terminal_width=200)
    assert """echo '{"tokens_per_expert": [[90, 20, 10, 40]]}' > loads.json""" in " ".join(
        result.output.split()
    )
    path = written(tmp_path, {"tokens_per_expert": [[90, 20, 10, 40]]})
    code, output = run(path, "--json", ranks=2, slots=3)
    assert code == 0
    assert json.loads(output)["balancedness"]["worst"] > 0.9


def test_a_window_of_steps_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, [[[9, 0, 1, 1]], [[0, 9, 1, 1]], [[9, 0, 1, 1]]])
    code, output = run(path, "--json", ranks=2, slots=2)
    assert code == 0
    assert len(json.loads(output)["physical_to_logical"]) == 1


def test_refuses(loads_file: Path) -> None:
    assert run(loads_file, slots=2)[0] == EXIT_CONFIG
    for value in ({}, "x", [[]], [["a"]]):
        with pytest.raises(ValueError, match=r"the loads (are|have)"):
            loads_of(value)
    cluster = cluster_of(np.ones((1, 4)), 2, 1, 3)
    rows = ([0, 1, 2], [0, 1, 2, 3, 4, 0], ["a"] * 6, [], [0.5, 1, 2, 3, 0, 1])
    for value in ({"other": 1}, *([row] for row in rows)):
        with pytest.raises(ValueError, match="current placement"):
            placement_of(value, np.ones((1, 4)), cluster)


def test_fewer_groups_than_nodes_is_said(tmp_path: Path) -> None:
    path = written(tmp_path, np.random.default_rng(3).lognormal(size=(2, 64)).tolist())
    for mode, groups, nodes in (("hybrid", 1, 2), ("hierarchical", 2, 4)):
        sizes = ("--groups", str(groups), "--nodes", str(nodes))
        code, output = run(path, "--mode", mode, *sizes, ranks=8, slots=12)
        assert code == EXIT_CONFIG
        assert f"{groups} expert groups are fewer than {nodes} nodes" in output


def test_loads_too_large_to_add_up_are_said(tmp_path: Path) -> None:
    code, output = run(written(tmp_path, [[1e308] * 4]), ranks=2, slots=3)
    assert code == EXIT_CONFIG
    assert "too many to add up" in output


def test_todays_placement_comes_with_its_split(tmp_path: Path) -> None:
    loads = np.random.default_rng(4).lognormal(sigma=1.0, size=(3, 16))
    path, today = written(tmp_path, loads.tolist()), tmp_path / "today.json"
    code, made = run(path, "--weighted", "--json")
    assert code == 0
    value = json.loads(made)
    assert value["split"] is not None
    today.write_text(made)
    code, shown = run(path, "--current", str(today))
    before = next(line for line in shown.splitlines() if "mean" in line)
    assert float(before.split()[1]) == pytest.approx(value["balancedness"]["mean"], abs=2e-4)
    today.write_text(json.dumps({**value, "split": value["split"][:1]}))
    code, output = run(path, "--current", str(today))
    assert code == EXIT_CONFIG
    assert "the current split is not a matrix" in output
