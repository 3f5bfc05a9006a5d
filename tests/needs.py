"""Optional tools that tests need, and how to get each.

A test without its tool is left out. `make test` ends with a table of what was left out, why, and the
command that gets it; both are the two halves of the reason that `leave_out` gives.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

HOW = " | to run: "
"""Between why a test was left out and the command that changes it, in the reason of its skip."""


@dataclass(frozen=True)
class Need:
    """Something that a machine may lack."""

    what: str
    how: str
    """The command that gets it."""
    is_there: Callable[[], bool]


def _have(*programs: str) -> Callable[[], bool]:
    return lambda: all(map(shutil.which, programs))


def _as_root(*programs: str) -> Callable[[], bool]:
    return lambda: os.geteuid() == 0 and _have(*programs)()


NEEDS = {
    "chromium": Need("Chromium", "apt-get install chromium", _have("chromium")),
    "promtool": Need("promtool", "apt-get install prometheus", _have("promtool")),
    "node": Need("node", "apt-get install nodejs", _have("node")),
    "nft": Need("nft", "apt-get install nftables", _have("nft")),
    "compiler": Need("a C++ compiler", "apt-get install g++", _have("g++")),
    "systemd": Need("systemd-analyze", "apt-get install systemd", _have("systemd-analyze")),
    "root": Need("root's rights", "sudo make test", _as_root()),
    "mount": Need(
        "the right to mount a file system",
        "sudo make test, with apt-get install e2fsprogs",
        _as_root("mkfs.ext4", "mount", "umount", "fsfreeze"),
    ),
}
"""Name -> tool. Those whose absence shows only when they are tried call `leave_out` themselves."""


def leave_out(why: str, how: str) -> NoReturn:
    """Skip the running test: `why` is what is missing, `how` the command that gets it."""
    pytest.skip(why + HOW + how)


def need(name: str) -> None:
    """Skip the running test if a tool is missing."""
    if not NEEDS[name].is_there():
        leave_out(f"no {NEEDS[name].what}", NEEDS[name].how)


def skip_unless(is_there: bool, why: str, how: str) -> pytest.MarkDecorator:
    """Return the mark of a test that needs what no row of the table can look for."""
    return pytest.mark.skipif(not is_there, reason=why + HOW + how)


def shared_data(name: str) -> Path:
    """Return a file or folder of public data. Skips the running test where it is not at hand."""
    from bench.shared_data import shared_data as find_folder  # It imports torch.

    folder = find_folder()
    if folder is None or not (folder / name).exists():
        leave_out(
            f"no public data {name} (bench/shared_data.py)", "HADAL_SHARED_DATA=FOLDER make test"
        )
    return folder / name
