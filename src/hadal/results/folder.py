"""Check of the folder to which a command writes its results."""

from __future__ import annotations

import os
from pathlib import Path


def check_folder(folder: Path) -> None:
    """Raise ValueError if results could not be written to the folder; creates nothing."""
    try:
        there = next(
            path
            for path in (folder, *folder.absolute().parents)
            if path.exists() or path.is_symlink()
        )
        if not there.is_dir():
            raise ValueError(f"--out {folder} cannot be written: {there} is not a folder.")
        # For root, permission bits do not matter; access() also detects a read-only file system.
        if not os.access(there, os.W_OK | os.X_OK):
            raise ValueError(f"--out {folder} cannot be written: {there} is not writable.")
    except OSError as error:
        raise ValueError(
            f"--out {folder} cannot be written: {(error.strerror or '').lower()}."
        ) from error
