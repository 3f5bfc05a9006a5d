"""Log lines of every process of `hadal serve`: as text for people, as JSON for programs.

    2026-11-23T08:33:12.123Z decode-0.2   WARNING rank 1 is gone: its connection ended
    {"time":"2026-11-23T08:33:12.123Z","level":"warning","process":"decode-0.2","message":"rank 1 ...","rank":2}

Fields besides the message (`fields`) are logged only in JSON, except for the id of the request that
a line is about: text lines have it too.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import msgspec

from hadal.core.config import ROLES
from hadal.core.errors import ConfigError
from hadal.runtime.process.private import append_private
from hadal.runtime.topology import unit_and_rank

TEXT, JSON = "text", "json"
FORMS = (TEXT, JSON)
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the HTTP request that this task works on. Every line logged meanwhile has it."""
_OUR_LINE = re.compile(rb'\{"time":"|\d{4}-\d\d-\d\dT[\d:.]+Z ')
_INDENT = "    "
"""Prefix of each line that continues the log line before it, such as those of a traceback."""
_FIELDS = "fields"
_MARK = b"\x1e"  # RS, the record separator: no line of text begins with it.
_TELL_S = 0.2


def start_log(process: str, level: str, form: str) -> None:
    """Write this process's log to stderr, under its name. Raises ConfigError: bad level or form."""
    check_log(level, form)
    handler = _Handler()
    handler.setFormatter(LineFormatter(process, form))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)


def check_log(level: str, form: str) -> None:
    """Raise ConfigError for an unknown level or form."""
    if not isinstance(logging.getLevelNamesMapping().get(level.upper()), int):
        raise ConfigError(f"--log-level is {level!r}; use debug, info, warning or error.")
    if form not in FORMS:
        raise ConfigError(f"--log-format is {form!r}; use text or json.")


def fields(**known: object) -> dict[str, object]:
    """Return the `extra` of a log call that adds these fields to its line."""
    return {_FIELDS: known}


def about(process: str) -> dict[str, object]:
    """Return the `extra` of a log call for a line about `process`, which may be another."""
    return {_FIELDS: _whereabouts(process)}


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            write_line(f"{self.format(record)}\n".encode())
        except Exception:  # A line that cannot be formatted is reported on stderr; work goes on.
            self.handleError(record)


def write_line(line: bytes) -> None:
    """Write a whole line to stderr, from any thread."""
    with contextlib.suppress(OSError):  # No reader, or the disk is full: the process goes on.
        _write(line)


def _to_stderr(line: bytes) -> None:
    os.write(2, line)


_write: Callable[[bytes], None] = _to_stderr


@contextlib.contextmanager
def written_by(write: Callable[[bytes], None]) -> Iterator[None]:
    """Pass lines to `write` instead of stderr within the block: a bar prints them above itself."""
    global _write
    _write = write
    try:
        yield
    finally:
        _write = _to_stderr


class LineFormatter(logging.Formatter):
    """Formatter of the log lines of one process."""

    def __init__(self, process: str, form: str) -> None:
        super().__init__()
        self._process = process
        self._form = form

    def format(self, record: logging.LogRecord) -> str:
        known: dict[str, object] = {**_whereabouts(self._process), **getattr(record, _FIELDS, {})}
        if request_id := REQUEST_ID.get():
            known.setdefault("request_id", request_id)
        message = _sound(record.getMessage())
        trace = _sound(self.formatException(record.exc_info)) if record.exc_info else ""
        if self._form == TEXT:
            line = _text(record.created, self._process, record.levelname, message)
            request = f" [request {known['request_id']}]" if "request_id" in known else ""
            return "".join([line, request, *(f"\n{_INDENT}{one}" for one in trace.splitlines())])
        known |= {"logger": record.name} | ({"traceback": trace} if trace else {})
        return _json(record.created, self._process, record.levelname, message, known)


READING = "reads the model's weights"


class Doing(msgspec.Struct, frozen=True):
    """Present activity of a process that starts. `total` 0: the amount of work is unknown."""

    what: str
    done: float = 0.0
    total: float = 0.0

    def __str__(self) -> str:
        return f"{self.what} ({self.done / self.total:.0%})" if self.total else self.what


def tell_doing(what: str, done: float = 0.0, total: float = 0.0) -> None:
    """Report the activity to the supervisor, by a marked line of output that the log leaves out."""
    with contextlib.suppress(OSError):
        os.write(2, _MARK + msgspec.json.encode(Doing(what, done, total)) + b"\n")


class Teller:
    """Reporter of the progress of one activity, a few times per second."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._logged_s = -math.inf

    def __call__(self, done: float, total: float = 0.0) -> None:
        if (now_s := time.monotonic()) - self._logged_s >= _TELL_S:
            self._logged_s = now_s
            tell_doing(self._what, done, total)


def doing_of(printed: bytes) -> Doing | None:
    """Return the activity that a line of output reports; None if it reports none."""
    if not printed.startswith(_MARK):
        return None
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(printed[len(_MARK) :], type=Doing)
    return None


def as_line(process: str, form: str, printed: bytes, unix_s: float) -> bytes:
    """Return a printed line as a log line: one of the process's log unchanged, any other (a
    library's, a crash's) as a warning of that process.
    """
    if _OUR_LINE.match(printed) or (form == TEXT and printed.startswith(_INDENT.encode())):
        return printed
    message = printed.decode("utf-8", "replace").rstrip()
    line = (
        _text(unix_s, process, "WARNING", message)
        if form == TEXT
        else _json(unix_s, process, "WARNING", message, _whereabouts(process))
    )
    return f"{line}\n".encode()


LOGS_FOLDER = "logs"
"""Folder in the run folder with the last lines of every process, for `hadal logs`."""
KEPT_BYTES = 1 << 20
"""Size of a full file of kept lines. A process has one full file and one that fills up."""


class KeptLines:
    """The last lines of one process, in an older and a newer file. Writing never raises, so a
    failing disk stops no process. Thread-safe: the end of a process's output may be read while its
    successor starts.
    """

    def __init__(self, folder: Path, process: str) -> None:
        self._old, self._path = _kept_paths(folder, process)
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self._num_bytes = 0

    def write(self, line: bytes) -> None:
        """Append a line. A full file replaces the older one."""
        with self._lock, contextlib.suppress(OSError):
            if self._file is not None and self._num_bytes > KEPT_BYTES:
                self._close()
                self._path.replace(self._old)
            if self._file is None:
                self._file = append_private(self._path)
                self._num_bytes = self._path.stat().st_size
            self._file.write(line)
            self._num_bytes += len(line)

    def close(self) -> None:
        """Close the file; the kept lines stay."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class KeptReader:
    """Reader of the kept lines of one process, used in another process."""

    def __init__(self, folder: Path, process: str) -> None:
        self._paths = _kept_paths(folder, process)
        self._inode = 0
        """Inode of the file that was read last; 0 before the first read."""
        self._at = 0
        """Number of bytes read from the file `_inode`."""

    def read(self) -> list[bytes]:
        """Return the whole lines that were not read yet: at first, all kept lines."""
        lines: list[bytes] = []
        with contextlib.ExitStack() as stack:
            files = []
            for path in self._paths:
                with contextlib.suppress(FileNotFoundError):
                    files.append(stack.enter_context(path.open("rb")))
            inodes = [os.fstat(file.fileno()).st_ino for file in files]
            first = inodes.index(self._inode) if self._inode in inodes else 0
            for file, inode in zip(files[first:], inodes[first:], strict=True):
                if inode != self._inode:
                    self._inode, self._at = inode, 0
                file.seek(self._at)
                rest = file.read()
                whole = rest[: rest.rfind(b"\n") + 1]
                self._at += len(whole)
                lines += whole.splitlines(keepends=True)
        return lines


def _kept_paths(folder: Path, process: str) -> tuple[Path, Path]:
    """Return the older file and the newer one."""
    return folder / f"{process}.old", folder / process


class KeptHandler(logging.Handler):
    """Log handler that keeps this process's own lines; the supervisor uses it."""

    def __init__(self, kept: KeptLines, process: str, form: str) -> None:
        super().__init__()
        self._kept = kept
        self.setFormatter(LineFormatter(process, form))

    def close(self) -> None:
        self._kept.close()
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._kept.write(f"{self.format(record)}\n".encode())
        except Exception:
            self.handleError(record)


def _text(unix_s: float, process: str, level: str, message: str) -> str:
    return f"{_time(unix_s)} {process:<12} {level:<7} " + message.replace("\n", f"\n{_INDENT}")


def _json(
    unix_s: float, process: str, level: str, message: str, known: Mapping[str, object]
) -> str:
    line = {
        "time": _time(unix_s),
        "level": level.lower(),
        "process": process,
        "message": message,
        **known,
    }
    return msgspec.json.encode(line).decode()


def _sound(text: str) -> str:
    """Escape bytes that are not text: names of files may hold them."""
    return text.encode("utf-8", "backslashreplace").decode()


def _time(unix_s: float) -> str:
    """Return the time in ISO 8601, UTC. Milliseconds order the lines of several processes."""
    return (
        datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.")
        + f"{int(unix_s * 1e3) % 1000:03d}Z"
    )


def _whereabouts(process: str) -> dict[str, object]:
    """Return the unit and the rank of a process as fields; a unit's leader has no rank."""
    unit, rank = unit_and_rank(process)
    if rank is not None:
        return {"unit": unit, "rank": rank}
    return {"unit": unit} if unit.partition("-")[0] in ROLES else {}
