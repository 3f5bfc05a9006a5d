"""`hadal logs`: last log lines of a server's processes, in the order of their times.

Reads the run folder of a server (commands/status finds it), so it works even if the server hangs.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable

from hadal.commands.status import Found, units
from hadal.core.errors import ConfigError
from hadal.core.messages.base import SUPERVISOR
from hadal.runtime.process.logs import LOGS_FOLDER, KeptReader
from hadal.runtime.process.process import is_listening

FOLLOW_S = 0.2
"""Seconds between reads of new lines with `--follow`."""
_WRITTEN = re.compile(rb'(?:\{"time":")?(\d{4}-\d\d-\d\dT[\d:.]+Z)')


def processes_of(found: Found, name: str | None) -> list[str]:
    """Return the names of processes meant by `name`: a process, or all of a unit; None: all. Raises
    ConfigError for an unknown name.
    """
    every = [*found.status.processes, SUPERVISOR]
    if name is None:
        return every
    of_unit = [plan.name for plan in units(found.plans).get(name, [])]
    if not of_unit and name not in every:
        raise ConfigError(f"there is no process or unit {name!r}; use one of {', '.join(every)}.")
    return of_unit or [name]


def in_order(lines_of_each: Iterable[Iterable[bytes]]) -> list[bytes]:
    """Return the lines of several processes in the order of their times."""
    entries: list[tuple[bytes, list[bytes]]] = []
    for lines in lines_of_each:
        for line in lines:
            written = _WRITTEN.match(line)
            if written or not entries:
                entries.append((written[1] if written else b"", [line]))
            else:
                entries[-1][1].append(line)  # Without a time it continues the line before.
    return [line for _, lines in sorted(entries, key=lambda entry: entry[0]) for line in lines]


def print_logs(found: Found, name: str | None, num_lines: int, *, is_followed: bool) -> None:
    """Print the last `num_lines`. `is_followed`: then print new lines until the server ends."""
    folder, out = found.folder / LOGS_FOLDER, sys.stdout.buffer
    readers = [KeptReader(folder, process) for process in processes_of(found, name)]
    lines = in_order(reader.read() for reader in readers)
    out.writelines(lines[max(0, len(lines) - num_lines) :])
    out.flush()
    is_up = is_followed
    while is_up:
        time.sleep(FOLLOW_S)
        is_up = is_listening(found.folder / f"{SUPERVISOR}.sock")  # Checked before the last read.
        out.writelines(in_order(reader.read() for reader in readers))
        out.flush()
