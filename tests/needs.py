"""Optional tools that tests need, and how to get each.

A test without its tool is skipped. `make test` ends with a table of skipped tests, reasons and the
commands that get the tools. Reason and command are the two halves of the skip reason that
`leave_out` gives.
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
"""Separator, in a skip reason, between the reason and the command that changes it."""


WITHOUT = "HADAL_TESTS_WITHOUT"
"""Environment variable: name of a tool that is treated as missing."""
_SYSTEM = "/usr/lib/postgresql/*/bin"
"""Debian's folder for PostgreSQL, which is not in PATH."""


@dataclass(frozen=True)
class Need:
    """A tool that a machine may lack."""

    what: str
    how: str
    """Command that gets the tool."""
    programs: tuple[str, ...] = ()
    is_any: bool = False
    """True if one of `programs` is enough, False if all are needed."""
    as_root: bool = False
    also_in: str = ""
    """Pattern of folders to search besides PATH."""

    def is_there(self) -> bool:
        """Return whether the programs and the rights are available."""
        enough = any if self.is_any else all
        return (os.geteuid() == 0 or not self.as_root) and enough(map(self.find, self.programs))

    def find(self, program: str) -> Path | None:
        """Return the path of a program; None if it is missing."""
        if found := shutil.which(program):
            return Path(found)
        folders = sorted(glob.glob(self.also_in), reverse=True) if self.also_in else []
        return next((path for one in folders if (path := Path(one) / program).exists()), None)


NEEDS = {
    "chromium": Need("Chromium", "apt-get install chromium", ("chromium",)),
    "postgresql": Need("PostgreSQL", "apt-get install postgresql", ("initdb",), also_in=_SYSTEM),
    "promtool": Need("promtool", "apt-get install prometheus", ("promtool",)),
    "node": Need("node", "apt-get install nodejs", ("node",)),
    "npm": Need("npm", "apt-get install npm", ("node", "npm")),
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
"""Name -> tool. A test that must try a tool to know if it works calls `leave_out` itself."""


def leave_out(why: str, how: str) -> NoReturn:
    """Skip the running test: `why` names the missing item, `how` the command that gets it."""
    pytest.skip(why + HOW + how)


def need(name: str) -> None:
    """Skip the running test if a tool is missing."""
    if name == os.environ.get(WITHOUT) or not NEEDS[name].is_there():
        leave_out(f"no {NEEDS[name].what}", NEEDS[name].how)


def hide(name: str, folder: Path) -> str:
    """Fill a folder with links to all programs in PATH except those of a tool; return it as a PATH."""
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).glob("*"):
            link = folder / program.name
            if program.name not in NEEDS[name].programs and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


def skip_unless(is_there: bool, why: str, how: str) -> pytest.MarkDecorator:
    """Return a skip mark for a test that needs something outside NEEDS."""
    return pytest.mark.skipif(not is_there, reason=why + HOW + how)


def shared_data(name: str) -> Path:
    """Return a file or folder of public data. Skips the running test if it is not available."""
    from bench.shared_data import shared_data as find_folder  # Imports torch.

    folder = find_folder()
    if folder is None or not (folder / name).exists():
        leave_out(
            f"no public data {name} (bench/shared_data.py)", "HADAL_SHARED_DATA=FOLDER make test"
        )
    return folder / name
