"""How a line of the log reads in every process of `hadal serve`: as text for people, as JSON for
programs.

    2026-11-23T08:33:12.123Z decode-0.2   WARNING rank 1 is gone: its connection ended
    {"time":"2026-11-23T08:33:12.123Z","level":"warning","process":"decode-0.2","message":"rank 1 ...","rank":2}

What is known besides the message (`fields`) is logged in JSON alone, all but the id of the request
that a line is about.
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
"""Id of the HTTP request that this task works on. Every line that is logged meanwhile has it."""
_OUR_LINE = re.compile(rb'\{"time":"|\d{4}-\d\d-\d\dT[\d:.]+Z ')
_INDENT = "    "
"""Begin of each line that belongs to the line of text before it, as a traceback's do."""
_FIELDS = "fields"
_MARK = b"\x1e"  # RS, the record separator: no line of text begins with it.
_TELL_S = 0.2


def start_log(process: str, level: str, form: str) -> None:
    """Write what this process logs to its stderr, under its name. Raises ConfigError for no such
    level or form.
    """
    check_log(level, form)
    handler = _Handler()
    handler.setFormatter(LineFormatter(process, form))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)


def check_log(level: str, form: str) -> None:
    """Raise ConfigError for no such level or form."""
    if not isinstance(logging.getLevelNamesMapping().get(level.upper()), int):
        raise ConfigError(f"--log-level is {level!r}; debug, info, warning or error are known.")
    if form not in FORMS:
        raise ConfigError(f"--log-format is {form!r}; text or json are known.")


def fields(**known: object) -> dict[str, object]:
    """What a logger's `extra` takes: what is known of this line by itself."""
    return {_FIELDS: known}


def about(process: str) -> dict[str, object]:
    """What a logger's `extra` takes to say that the line is about that process, whoever writes it."""
    return {_FIELDS: _whereabouts(process)}


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            write_line(f"{self.format(record)}\n".encode())
        except Exception:  # A line that cannot be made is reported on stderr and stops no work.
            self.handleError(record)


def write_line(line: bytes) -> None:
    """Write it to stderr, whole, from any thread."""
    with contextlib.suppress(OSError):  # Nobody reads, or the disk is full: the process goes on.
        _write(line)


def _to_stderr(line: bytes) -> None:
    os.write(2, line)


_write: Callable[[bytes], None] = _to_stderr


@contextlib.contextmanager
def written_by(write: Callable[[bytes], None]) -> Iterator[None]:
    """Meanwhile `write` is given the lines: it knows what else stands on the terminal."""
    global _write
    _write = write
    try:
        yield
    finally:
        _write = _to_stderr


class LineFormatter(logging.Formatter):
    """Lines of one process."""

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
    """What a process that starts is busy with. `total` 0: nobody knows how much of it there is."""

    what: str
    done: float = 0.0
    total: float = 0.0

    def __str__(self) -> str:
        return f"{self.what} ({self.done / self.total:.0%})" if self.total else self.what


def tell_doing(what: str, done: float = 0.0, total: float = 0.0) -> None:
    """Tell the supervisor, which reads what this process prints: a line that is none of the log."""
    with contextlib.suppress(OSError):
        os.write(2, _MARK + msgspec.json.encode(Doing(what, done, total)) + b"\n")


class Teller:
    """Tells of one thing as it goes on, a few times a second."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._logged_s = -math.inf

    def __call__(self, done: float, total: float = 0.0) -> None:
        if (now_s := time.monotonic()) - self._logged_s >= _TELL_S:
            self._logged_s = now_s
            tell_doing(self._what, done, total)


def doing_of(printed: bytes) -> Doing | None:
    """What a line tells of its process; None if it is not such a line."""
    if not printed.startswith(_MARK):
        return None
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(printed[len(_MARK) :], type=Doing)
    return None


def as_line(process: str, form: str, printed: bytes, unix_s: float) -> bytes:
    """A line that a process printed: its log's as it is, any other (a library's, a crash's) as one
    of its log.
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
"""In the run folder: the last lines of every process, for `hadal logs`."""
KEPT_BYTES = 1 << 20
"""Of a process, at least: as much again is kept until that is full."""


class KeptLines:
    """The last lines of one process, in a file and the one before it. Writing never raises: a
    process goes on whatever the disk does. From any thread: what a process leaves in its pipe may
    be read while the next one starts.
    """

    def __init__(self, folder: Path, process: str) -> None:
        self._old, self._path = _kept_paths(folder, process)
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self._num_bytes = 0

    def write(self, line: bytes) -> None:
        """Keep a line; the oldest go when there are too many."""
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
        """Close the file; what is kept stays."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class KeptReader:
    """Reads what is kept of one process, from another."""

    def __init__(self, folder: Path, process: str) -> None:
        self._paths = _kept_paths(folder, process)
        self._inode = 0
        """The file that was read last, and ..."""
        self._at = 0
        """... up to where."""

    def read(self) -> list[bytes]:
        """Whole lines that were not read yet, all that are kept at first."""
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
    """The older file and the newer one."""
    return folder / f"{process}.old", folder / process


class KeptHandler(logging.Handler):
    """Keeps what this process logs itself, as the supervisor does."""

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
    """A name of a file may hold bytes that are no text."""
    return text.encode("utf-8", "backslashreplace").decode()


def _time(unix_s: float) -> str:
    """ISO 8601, UTC. Milliseconds: what processes notice is compared by them."""
    return (
        datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.")
        + f"{int(unix_s * 1e3) % 1000:03d}Z"
    )


def _whereabouts(process: str) -> dict[str, object]:
    """The unit and the rank that a process is, or leads."""
    unit, rank = unit_and_rank(process)
    if rank is not None:
        return {"unit": unit, "rank": rank}
    return {"unit": unit} if unit.partition("-")[0] in ROLES else {}
