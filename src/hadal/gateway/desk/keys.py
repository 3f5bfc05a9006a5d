"""Keys file: read, written by `hadal keys`, and followed while a server runs.

    file --once a second, if it changed--> the gateway with the front --asked by path--> the others

The previous keys stay, and the log has the reason, if the file is unreadable or invalid, has no
keys, or has none of the previous tenants: an accident may have emptied or overwritten it. Tenants
that `hadal keys revoke` noted in the file as revoked do not count as previous tenants. A file that
differs at each look is still being written, and is read once it is stable. The other gateways may
run on hosts without the file; they refuse all requests until they have its keys.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import msgspec

from hadal.core.errors import ConfigError
from hadal.core.messages.gateways import QueryReply
from hadal.gateway.desk.auth import Keys, parse_key
from hadal.runtime.process.private import read_private, replace_private

log = logging.getLogger("hadal.gateway")

PATH = "/keys"
"""Path under which the gateway with the front sends the keys to the others."""
FOLLOW_S = 1.0
"""Period of checking for changed keys."""
_COMMENT = "#"
_REVOKED = "# revoked: "
"""Prefix of a note in the file, before the name of a tenant removed by `hadal keys revoke`."""
_UNCHANGED = 304


def read_lines(path: Path) -> tuple[str, ...]:
    """Return the lines of a keys file that contain keys. Raises ConfigError, which gives the number
    of an invalid line but does not show the line.
    """
    return _keys_in(path, _lines(path))


def _keys_in(path: Path, written: Iterable[str]) -> tuple[str, ...]:
    """Return the lines that contain keys. Raises ConfigError as `read_lines` does."""
    lines = []
    for number, line in enumerate(written, 1):
        if line.strip() and not line.lstrip().startswith(_COMMENT):
            try:
                parse_key(line)
            except ConfigError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from None
            lines.append(line.strip())
    return tuple(lines)


def _lines(path: Path) -> list[str]:
    try:
        return [line.removesuffix("\r") for line in _text(path).split("\n")]
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: the API keys are not UTF-8 text.") from error


def _text(path: Path) -> str:
    return read_private(path, "the API keys").decode("utf-8-sig")


def names_in(path: Path) -> set[str]:
    """Return the names of a keys file's tenants. Raises ConfigError."""
    return _names(read_lines(path))


def _names(lines: Iterable[str]) -> set[str]:
    return {parse_key(line)[1].name for line in lines}


def keys_of(given: Sequence[str], path: Path, lines: Sequence[str]) -> Keys:
    """Return the keys of a server: given ones, and those of its file. Raises ConfigError."""
    try:
        return Keys((*given, *lines), is_closed=True)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def add_line(path: Path, line: str) -> bool:
    """Add a key to a file, creating the file if necessary. Return True if its name was revoked
    before. Raises ConfigError if the file cannot be read or written, or has a key of that name.
    """
    with _locked(path):
        written = _lines(path) if path.exists() else []
        lines = _keys_in(path, written)
        name = parse_key(line)[1].name
        if name in _names(lines):
            raise ConfigError(
                f"{path} already has a key with the name {name}. Choose another name, or run"
                f" `hadal keys revoke {name}` first."
            )
        keys_of((), path, (*lines, line))
        _replace(path, [*written, line])
        return name in _revoked(written)


def remove_name(path: Path, name: str) -> None:
    """Remove the keys of a tenant from a file, and note there that it was revoked. Raises
    ConfigError if it has no key, or if no other tenant has one.
    """
    with _locked(path):
        written = _lines(path)
        lines = _keys_in(path, written)
        if name not in _names(lines):
            raise ConfigError(f"{path}: no key has the name {name[:70]!r}; see `hadal keys list`.")
        kept = {line for line in lines if parse_key(line)[1].name != name}
        if not kept:
            raise ConfigError(
                f"{path}: only {name} has keys, and a server needs at least one. Add another tenant"
                " first, or stop the server."
            )
        rest = [line for line in written if line.strip() in kept or line.strip() not in lines]
        _replace(path, [*rest, f"{_REVOKED}{name}"] if name not in _revoked(rest) else rest)


def _revoked(written: Iterable[str]) -> set[str]:
    """Return the revoked names, from the notes in a file."""
    return {line.removeprefix(_REVOKED).strip() for line in written if line.startswith(_REVOKED)}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock the file's folder: one writer at a time."""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{path}: its folder cannot be opened ({error.strerror}).") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _replace(path: Path, lines: Iterable[str]) -> None:
    """Write the file. Its owner stays, also if root writes it."""
    text = "\n".join(lines).strip("\n")
    try:
        replace_private(path, f"{text}\n".encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}).") from error


class KeysFile:
    """Keys file followed by a gateway."""

    def __init__(self, given: Sequence[str], path: Path) -> None:
        """`given`: keys in addition to those of the file."""
        self._given = tuple(given)
        self._path = path
        self._names: set[str] = set()
        """Tenants of the last accepted content."""
        self._seen: tuple[int, ...] = ()
        self._coming: tuple[int, ...] = ()
        """`_stat` at the last look, if changed; the file is read if the next look is equal."""
        self._answer: tuple[str, bytes] = ("", b"")
        """Answer to other gateways: a digest of the keys, and their lines."""

    def changed(self) -> Keys | None:
        """Return the keys at the first call. Later, return them if the file has changed since it
        was last read, but not since the last look; else None. Raises ConfigError, once per change.
        """
        seen = self._stat()
        if seen == self._seen:
            return None
        if self._seen and seen != self._coming:
            self._coming = seen
            return None
        self._seen = seen
        written = _lines(self._path)
        lines = _keys_in(self._path, written)
        keys = keys_of(self._given, self._path, lines)
        self._check_kept(_names(lines), _revoked(written))
        body = msgspec.json.encode([*self._given, *lines])
        self._answer = sha256(body).hexdigest(), body
        return keys

    def _check_kept(self, names: set[str], revoked: set[str]) -> None:
        """Raise ConfigError if the file may have been emptied or overwritten by accident."""
        if not names:
            raise ConfigError(f"{self._path}: the file contains no keys.")
        left = self._names - revoked
        if left and not left & names:
            raise ConfigError(
                f"{self._path}: the file contains none of its former tenants. Add the new ones first,"
                " then remove the old ones with `hadal keys revoke`."
            )
        self._names = names

    def _stat(self) -> tuple[int, ...]:
        try:
            found = self._path.stat()
        except OSError as error:
            return (error.errno or -1,)
        return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode, found.st_ctime_ns

    async def page(self, query: Mapping[str, str]) -> tuple[int, bytes]:
        """Answer another gateway: send the lines if its digest differs."""
        digest, body = self._answer
        return (_UNCHANGED, b"") if query.get("digest") == digest else (200, body)


class FetchedKeys:
    """Keys of a gateway without the front, received from the front's gateway."""

    def __init__(self, ask: Callable[[Mapping[str, str]], Awaitable[QueryReply | None]]) -> None:
        self._ask = ask
        self._digest = ""

    async def changed(self) -> Keys | None:
        """Return the keys if changed since the last call, else None. Raises ConfigError."""
        answer = await self._ask({"digest": self._digest})
        if answer is None or answer.status != 200 or not answer.body:
            return None
        keys = Keys(msgspec.json.decode(answer.body, type=list[str]), is_closed=True)
        self._digest = sha256(answer.body).hexdigest()
        return keys


async def follow(
    changed: Callable[[], Awaitable[Keys | None]], take: Callable[[Keys], None]
) -> None:
    """Check for changed keys every FOLLOW_S and pass them to `take`, until cancelled."""
    while True:
        try:
            keys = await changed()
            if keys is not None:
                take(keys)
                log.info("API keys changed: %d are accepted now", len(keys.tenants))
        except ConfigError as error:
            log.error("the API keys were not changed: %s", error)
        await asyncio.sleep(FOLLOW_S)
