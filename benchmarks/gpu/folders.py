"""Where weights of many gigabytes can lie for the time of a run."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

MEMORY_FOLDER = Path("/dev/shm")
SPARE_IN_MEMORY, SPARE_ON_DISK = 1.5, 1.1


def working_folder(needed_bytes: int) -> Path:
    """A new folder with room for so much: in memory where there is room for half as much again, which is where a page
    cache would have it, else among temporary files. Raises OSError where neither has room."""
    for parent, spare in ((MEMORY_FOLDER, SPARE_IN_MEMORY), (Path(tempfile.gettempdir()), SPARE_ON_DISK)):
        if parent.is_dir() and os.access(parent, os.W_OK) and shutil.disk_usage(parent).free > spare * needed_bytes:
            return Path(tempfile.mkdtemp(prefix="headrace-gpu-", dir=parent))
    raise OSError(f"no folder has room for {needed_bytes / 1e9:.1f} GB of weights")
