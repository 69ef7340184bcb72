"""The files of volumes on a node: a disk image where a virtual machine used it, a folder where a container did."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from marketplace.agent.records import valid_id

_log = logging.getLogger(__name__)


def erase(folder: Path, ids: Iterable[str]) -> None:
    """Remove what there is of volumes. One that cannot be removed is told to the operator and keeps nobody waiting."""
    for id in ids:
        if not valid_id(id):
            continue
        try:
            (folder / f"{id}.qcow2").unlink(missing_ok=True)
            if (folder / id).is_dir():
                shutil.rmtree(folder / id)
        except OSError as error:
            _log.error("the files of volume %s are still there: %s", id, error)


def used(folder: Path) -> dict[str, int]:
    """Bytes that each volume takes of the disk, by id. Blocking, for as long as there are files."""
    found: dict[str, int] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        id = path.name.removesuffix(".qcow2")
        if valid_id(id):
            found[id] = found.get(id, 0) + _taken(path)
    return found


def _taken(path: Path) -> int:
    """Bytes of a file, or of all below a folder. A file with several names counts once; what goes meanwhile, not."""
    inodes: dict[tuple[int, int], int] = {}
    names = [str(path)]
    for top, folders, files in os.walk(path):
        names += [f"{top}/{name}" for name in (*folders, *files)]
    for name in names:
        try:
            about = os.lstat(name)
        except OSError:
            continue
        inodes[about.st_dev, about.st_ino] = about.st_blocks * 512
    return sum(inodes.values())
