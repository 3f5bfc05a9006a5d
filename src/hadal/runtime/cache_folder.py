"""Folder of a deployment's disk cache: its full path, its creation and its problems.

A plan inspects the folder's file system and creates nothing. A start makes the folder, and fails if
it can never be used. If the folder fails later, the only loss is cache hits.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path

from hadal.core.config import Deployment
from hadal.core.errors import ConfigError
from hadal.runtime.amounts import gb
from hadal.runtime.memory import MemoryPlan

_FORGIVEN_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors after which the folder is still useful: it may have space later, or blocks to read."""


def absolute_folder(folder: str) -> str:
    """Return the folder's absolute path; "" for "". Raises ConfigError."""
    if not folder:
        return ""
    try:
        path = Path(folder).expanduser().absolute()
    except RuntimeError:
        user = folder.partition("/")[0]
        raise ConfigError(
            f"cache.folder is {folder}: {user} has no home here. Give the whole path."
        ) from None
    if os.path.exists(path) and not os.path.isdir(
        path
    ):  # Neither call raises if the folder is inaccessible.
        raise ConfigError(
            f"cache.folder is {path}, which is not a folder. Name a folder; it is created if missing."
        )
    return str(path)


def make_cache_folder(folder: str) -> None:
    """Make a private folder. Raises ConfigError if unusable, but not if it is full or read-only."""
    if not folder:
        return
    path = Path(folder)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        if error.errno in _FORGIVEN_ERRORS and path.is_dir():
            return
        raise ConfigError(
            f"the cache folder {path} cannot be used ({error.strerror}). Name a folder that you may"
            " write to in --cache-folder or cache.folder, or leave it out: then no KV is kept on"
            " disk."
        ) from error


def cache_warnings(deployment: Deployment, memory: MemoryPlan) -> list[str]:
    """Return what will limit or prevent disk caching or make it unsafe, one sentence each."""
    cache = deployment.cache
    if not cache.folder:
        return []
    disk_bytes = cache.disk_mb * 2**20
    if disk_bytes < memory.block_bytes:
        return [
            f"cache.disk_mb = {cache.disk_mb} is less than one block of {gb(memory.block_bytes)}:"
            " nothing is kept."
        ]
    folder = Path(cache.folder)
    try:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not os.access(there, os.W_OK | os.X_OK):
            return [f"cache.folder {folder} cannot be written to: nothing is kept there."]
        status = os.statvfs(there)
        free_bytes = status.f_bavail * status.f_frsize + _held_bytes(folder)
        found = folder.stat() if there == folder else None
        # If it has no other files, a folder that this user may chmod is made private when the first
        # process opens it (runtime/store/owned_segments), so only other open folders are reported.
        is_ours = (
            found is not None
            and os.geteuid() in (0, found.st_uid)
            and not found.st_mode & stat.S_ISVTX
        )
        is_open = found is not None and bool(found.st_mode & stat.S_IWOTH) and not is_ours
    except OSError as error:
        return [
            f"cache.folder {folder} fails ({error.strerror}): nothing is kept there until it works."
        ]
    warnings = []
    if free_bytes < disk_bytes:
        warnings.append(
            f"cache.disk_mb = {cache.disk_mb} is more than the {gb(free_bytes)} that are free in"
            f" {folder}."
        )
    if is_open:
        # Checksums detect damage, not intent; and without API keys cache names can be guessed.
        warnings.append(
            f"cache.folder {folder} can be written to by every user here, who could put false KV in"
            " it: name a folder of your own."
        )
    return warnings


def _held_bytes(folder: Path) -> int:
    """Return the bytes that the folder's files occupy; new blocks will overwrite them."""
    held_bytes = 0
    for path in folder.glob("*"):
        with contextlib.suppress(FileNotFoundError):  # Another deployment removed it meanwhile.
            held_bytes += path.stat().st_blocks * 512  # st_blocks counts 512 bytes (stat(2)).
    return held_bytes
