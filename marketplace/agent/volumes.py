"""The files of volumes on a node: a disk image where a virtual machine used it, a folder where a container did."""

from __future__ import annotations

import logging
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
