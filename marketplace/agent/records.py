"""What the node knows of its own machines: one small file in the folder of each, written before and after acting.

These files are the agent's database. They are replaced whole, so that a reader finds the old record or the new one.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Literal

import msgspec

from marketplace.agent.wire import Ending, Failure, Spec, Via, Want

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
_FILE = "record.json"

Stage = Literal["Creating", "Created", "Failing", "Failed", "Ended"]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One machine, from the first time the server wanted it to the last time it is spoken of.

    Creating -> Created, or Failing (its remains are being removed) -> Failed; any -> Ended when it has been destroyed.
    """

    id: str
    spec: Spec | None
    """None of a machine that carries the label but was found without a record"""
    stage: Stage
    created_at: int
    want: Want = "Running"
    gen_applied: int = 0
    """generation whose wish has been carried out"""
    reset_applied: int = 0
    """written before a reset is done: a crash may lose a reset, and never repeats one"""
    started_at: int | None = None
    ready_via: Via | None = None
    ready_told: bool = False
    """the server has acknowledged that it is ready"""
    error: Failure | None = None
    ended: Ending | None = None
    """how it ended by itself, once that was found out"""
    stray_rounds: int = 0
    """consecutive rounds in which nothing wanted it"""


class RecordError(Exception):
    """A record cannot be read. The message names the file."""


def valid_id(text: str) -> bool:
    """Whether the text may name an instance, and so a folder."""
    return _ID.fullmatch(text) is not None


class Records:
    """All records below one folder."""

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        """Read what is there. `durable` waits for the disk at every write. Raises RecordError."""
        self.folder_of_all = folder
        self._durable = durable
        self._held: dict[str, Record] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob(f"*/{_FILE}")):
            self._held[path.parent.name] = _read(path)

    def __contains__(self, id: str) -> bool:
        """Whether there is a record of that id."""
        return id in self._held

    def get(self, id: str) -> Record | None:
        """The record of that id."""
        return self._held.get(id)

    def all(self) -> dict[str, Record]:
        """A copy of all records by id."""
        return dict(self._held)

    def folder(self, id: str) -> Path:
        """Where everything of that machine is kept."""
        assert valid_id(id), "names of folders come from checked ids"
        return self.folder_of_all / id

    def put(self, record: Record) -> None:
        """Write a record, replacing an older one."""
        folder = self.folder(record.id)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(folder / _FILE, msgspec.json.encode(record), durable=self._durable)
        self._held[record.id] = record

    def clear(self, id: str) -> None:
        """Remove everything in the folder except the record."""
        folder = self.folder(id)
        for path in folder.iterdir() if folder.exists() else ():
            if path.name == _FILE:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def forget(self, id: str) -> None:
        """Remove the record with its folder."""
        shutil.rmtree(self.folder(id), ignore_errors=True)
        self._held.pop(id, None)


def write_whole(path: Path, data: bytes, *, durable: bool) -> None:
    """Replace a file so that every reader sees all of the old or all of the new."""
    beside = path.with_suffix(".new")
    with beside.open("wb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    beside.chmod(0o600)
    beside.replace(path)


def _read(path: Path) -> Record:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except (OSError, msgspec.MsgspecError) as error:
        raise RecordError(f"{path}: {error}") from error
