"""Optional tools that tests need, and how to get each.

A test without its tool is left out. `make test` ends with a table of what was left out, why, and the
command that gets it; both are the two halves of the reason that `leave_out` gives.
"""

from __future__ import annotations

import glob
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

HOW = " | to run: "
"""Between why a test was left out and the command that changes it, in the reason of its skip."""


WITHOUT = "HADAL_TESTS_WITHOUT"
"""Environment variable: the name of a tool to be tested without, though it is there."""
_SYSTEM = "/usr/lib/postgresql/*/bin"
"""Debian's place for PostgreSQL, which is not in PATH."""


@dataclass(frozen=True)
class Need:
    """Something that a machine may lack."""

    what: str
    how: str
    """The command that gets it."""
    programs: tuple[str, ...] = ()
    is_any: bool = False
    """One of the programs is enough."""
    as_root: bool = False
    also_in: str = ""
    """Pattern of folders to look in besides PATH."""

    def is_there(self) -> bool:
        """Return whether the programs are there, and the rights."""
        enough = any if self.is_any else all
        return (os.geteuid() == 0 or not self.as_root) and enough(map(self.find, self.programs))

    def find(self, program: str) -> Path | None:
        """Return the path of a program; None if it is not there."""
        if found := shutil.which(program):
            return Path(found)
        folders = sorted(glob.glob(self.also_in), reverse=True) if self.also_in else []
        return next((path for one in folders if (path := Path(one) / program).exists()), None)


NEEDS = {
    "chromium": Need("Chromium", "apt-get install chromium", ("chromium",)),
    "postgresql": Need("PostgreSQL", "apt-get install postgresql", ("initdb",), also_in=_SYSTEM),
    "promtool": Need("promtool", "apt-get install prometheus", ("promtool",)),
    "node": Need("node", "apt-get install nodejs", ("node",)),
    "compiler": Need("C++ compiler", "apt-get install g++", ("c++", "g++", "clang++"), is_any=True),
    "systemd": Need("systemd-analyze", "apt-get install systemd", ("systemd-analyze",)),
    "root": Need("root's rights", "sudo make test", as_root=True),
    "hosts": Need(
        "rights and tools for network namespaces",
        "sudo make test, with apt-get install iproute2 util-linux",
        ("ip", "tc", "nsenter", "unshare"),
        as_root=True,
    ),
    "mount": Need(
        "rights and tools to mount a file system",
        "sudo make test, with apt-get install e2fsprogs",
        ("mkfs.ext4", "mount", "umount", "fsfreeze"),
        as_root=True,
    ),
}
"""Name -> tool. What shows only when it is tried calls `leave_out` itself."""


def leave_out(why: str, how: str) -> NoReturn:
    """Skip the running test: `why` is what is missing, `how` the command that gets it."""
    pytest.skip(why + HOW + how)


def need(name: str) -> None:
    """Skip the running test if a tool is missing."""
    if name == os.environ.get(WITHOUT) or not NEEDS[name].is_there():
        leave_out(f"no {NEEDS[name].what}", NEEDS[name].how)


def hide(name: str, folder: Path) -> str:
    """Fill a folder with links to all programs in PATH but those of a tool; returns it as a PATH."""
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).glob("*"):
            link = folder / program.name
            if program.name not in NEEDS[name].programs and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


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
