"""The folder that a command writes its results to."""

from __future__ import annotations

import os
from pathlib import Path


def check_folder(folder: Path) -> None:
    """Raises ValueError if plans could not be written there; makes nothing."""
    try:
        there = next(
            path
            for path in (folder, *folder.absolute().parents)
            if path.exists() or path.is_symlink()
        )
        if not there.is_dir():
            raise ValueError(f"--out {folder} cannot be written: {there} is not a folder.")
        # Root may write where the bits say nobody may; a file system that is mounted to be read
        # says no to all.
        if not os.access(there, os.W_OK | os.X_OK):
            raise ValueError(f"--out {folder} cannot be written: nothing can be made in {there}.")
    except OSError as error:
        raise ValueError(
            f"--out {folder} cannot be written: {(error.strerror or '').lower()}."
        ) from error
