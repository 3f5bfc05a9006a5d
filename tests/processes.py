"""Helpers that look at processes."""

from __future__ import annotations

import contextlib
from pathlib import Path


def children_of(pid: int, word: bytes) -> list[int]:
    """Return the pids, ascending, of a process's children with this word in their command line. The
    kernel's own list (/proc/PID/task/PID/children) may leave out a child while another one ends.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and word in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return sorted(found)


def is_alive(pid: int) -> bool:
    """Return whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
