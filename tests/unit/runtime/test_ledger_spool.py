"""Facts that wait in a file: whole or not there, read once, and by whoever comes next if their
writer is dead.
"""

import os
from pathlib import Path

import pytest

from hadal.core.facts import NodesFact, PackedFacts, RequestFact
from hadal.runtime.ledger.writer import Spool, adopted


def facts(*ids: str) -> PackedFacts:
    nodes = NodesFact("u", ids[0], "decode", 1, 8, 1.0, 2.0)
    return PackedFacts(
        tuple(RequestFact(one, "t", "m", 1, 2, 0, 0, "504", 1.0, 2.0) for one in ids), (nodes,)
    )


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_what_is_kept_is_read_in_order_and_leaves_no_file(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "new", "l")
    assert spool.is_empty
    assert not (tmp_path / "new").exists(), "no file before there is something to keep"
    batches = [facts("a"), facts("b", "c")]
    assert all(spool.append(batch) for batch in batches)
    assert not spool.is_empty
    assert list(spool.read()) == batches
    spool.clear()
    assert spool.is_empty
    assert files(tmp_path / "new") == []
    assert spool.append(batches[1])
    assert list(spool.read()) == batches[1:]
    spool.clear()


def test_it_has_a_limit(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "l", max_bytes=300)
    kept = 0
    while spool.append(facts(f"r{kept}")):
        kept += 1
    assert kept > 1
    assert len(list(spool.read())) == kept
    assert files(tmp_path)[0].stat().st_size <= 300
    spool.clear()


def test_a_living_writers_file_is_left_alone_and_a_dead_ones_is_taken(tmp_path: Path) -> None:
    first, second = Spool(tmp_path, "l"), Spool(tmp_path, "l")
    first.append(facts("a"))
    Spool(tmp_path, "another").append(facts("z"))
    [path] = second.orphans()
    with adopted(path) as left:
        assert left is None
    first.close()  # As the end of its process would.
    with adopted(path) as left:
        assert left is not None
        with adopted(path) as again:
            assert again is None, "one takes it"
        assert list(left) == [facts("a")]
    assert second.orphans() == []
    with adopted(path) as left:
        assert left is None, "it is gone"


def test_what_fails_while_it_is_taken_stays(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "l")
    spool.append(facts("a"))
    spool.close()
    [path] = Spool(tmp_path, "l").orphans()
    with pytest.raises(ZeroDivisionError), adopted(path):
        _ = 1 // 0  # As a database does that is down.
    with adopted(path) as left:
        assert left is not None
        assert list(left) == [facts("a")]


@pytest.mark.parametrize("where", ["cut in the head", "cut in the body", "a wrong byte"])
def test_a_record_that_is_not_whole_ends_the_file(tmp_path: Path, where: str) -> None:
    spool = Spool(tmp_path, "l")
    spool.append(facts("a"))
    [path] = files(tmp_path)
    size = path.stat().st_size
    spool.append(facts("b"))
    spool.close()
    if where == "a wrong byte":
        with path.open("r+b") as file:
            file.seek(size + 12)
            file.write(b"\xff")
    else:
        os.truncate(path, size + (3 if where == "cut in the head" else 20))
    with adopted(path) as left:
        assert left is not None
        assert list(left) == [facts("a")]
    assert files(tmp_path) == [path.with_name(f"{path.name}.damaged")], (
        "what cannot be read is not thrown away"
    )


def test_a_disk_that_fails_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(tmp_path, "l")
    spool.append(facts("a"))

    def fail(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fail)
        with pytest.raises(OSError, match="No space"):
            spool.append(facts("b"))
    spool.append(facts("c"))
    assert list(spool.read()) == [facts("a"), facts("c")]
    spool.clear()


def test_what_is_kept_outlives_its_file(tmp_path: Path) -> None:
    """Somebody may tidy up while the database is down."""
    spool = Spool(tmp_path, "l")
    spool.append(facts("a"))
    for path in files(tmp_path):
        path.unlink()
    assert spool.append(facts("b"))
    assert list(spool.read()) == [facts("a"), facts("b")]
    spool.clear()
    assert files(tmp_path) == []


def test_a_writer_removes_no_file_that_it_cannot_read(tmp_path: Path) -> None:
    spool = Spool(tmp_path, "l")
    spool.append(facts("a"))
    spool.append(facts("b"))
    [path] = files(tmp_path)
    sound = path.read_bytes()
    path.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    assert list(spool.read()) == [facts("a")]
    spool.clear()
    assert [one.suffix for one in files(tmp_path)] == [".damaged"]


def test_a_ledger_finds_its_own_spools_whatever_it_is_called(tmp_path: Path) -> None:
    for stem in ("l", "l.sqlite", "l[1]"):
        left = Spool(tmp_path, stem)
        left.append(facts("a"))
        left.close()
    for stem in ("l", "l.sqlite", "l[1]"):
        assert [path.name.rsplit(".", 2)[0] for path in Spool(tmp_path, stem).orphans()] == [stem]
    assert Spool(tmp_path / "nowhere", "l").orphans() == []
