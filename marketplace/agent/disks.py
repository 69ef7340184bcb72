"""Disks that outlive their machine for a while: saved environments, each in a folder of its own until it expires.

A disk is an overlay over `base.img` beside it, which is a hard link to the cached image: the cache may drop its name of
an image without harming a disk. Files are moved in an order that lets a half-done move be seen and finished.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec

from marketplace.agent.inventory_wire import RetainedDisk
from marketplace.agent.records import valid_id, write_whole

DISK = "disk.qcow2"
BASE = "base.img"
_ABOUT = "retained.json"


class GoneError(Exception):
    """There is no such retained disk."""


class RetainedDisks:
    """All retained disks below one folder."""

    def __init__(self, folder: Path) -> None:
        """Make the folder if need be."""
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def all(self) -> list[RetainedDisk]:
        """Those that are complete, by id: the description and the disk itself are there."""
        found = []
        for path in sorted(self._folder.glob(f"*/{_ABOUT}")):
            if (path.parent / DISK).exists():
                found.append(msgspec.json.decode(path.read_bytes(), type=RetainedDisk))
        return found

    def retire(self, id: str, machine: Path, *, expires_at: int, disk_bytes: int, os_label: str = "") -> None:
        """Take the disk out of a machine's folder. No error where there is none."""
        if not (machine / DISK).exists():
            return
        into = self._folder / id
        into.mkdir(exist_ok=True, mode=0o700)
        about = RetainedDisk(instance_id=id, disk_bytes=disk_bytes, expires_at=expires_at, os_label=os_label)
        write_whole(into / _ABOUT, msgspec.json.encode(about), durable=True)
        _move(machine, into)

    def claim(self, id: str, machine: Path) -> None:
        """Move a retained disk into a machine's folder; done once, however often it is asked for.

        Raises GoneError where there is none.
        """
        if (machine / _ABOUT).exists() and (machine / DISK).exists():
            return
        folder = self._folder / id if valid_id(id) else None
        if folder is None or not (folder / _ABOUT).exists() or not (folder / DISK).exists():
            raise GoneError(id)
        write_whole(machine / _ABOUT, (folder / _ABOUT).read_bytes(), durable=True)
        _move(folder, machine)
        shutil.rmtree(folder)

    def give_back(self, machine: Path) -> None:
        """Undo `claim` for a machine that was never made; nothing for one that claimed no disk."""
        if not (machine / _ABOUT).exists() or not (machine / DISK).exists():
            return
        about = (machine / _ABOUT).read_bytes()
        into = self._folder / msgspec.json.decode(about, type=RetainedDisk).instance_id
        into.mkdir(exist_ok=True, mode=0o700)
        write_whole(into / _ABOUT, about, durable=True)
        _move(machine, into)

    def erase(self, ids: Iterable[str]) -> None:
        """Remove these; no error where there is none."""
        for id in ids:
            if valid_id(id) and (self._folder / id).is_dir():
                shutil.rmtree(self._folder / id)

    def erase_expired(self, now: int) -> list[str]:
        """Remove those whose time is over, and incomplete ones; return the ids."""
        live = {disk.instance_id for disk in self.all() if disk.expires_at > now}
        erased = sorted(path.name for path in self._folder.iterdir() if path.name not in live)
        for id in erased:
            shutil.rmtree(self._folder / id)
        return erased


def _move(source: Path, target: Path) -> None:
    """Move base and disk; the disk last, because its presence says that the move is complete."""
    for name in (BASE, DISK):
        if (source / name).exists():
            (source / name).replace(target / name)
