"""Processes of this machine, known by more than their number: numbers are given again."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

_PROC = Path("/proc")
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LOOK_S = 0.05


def running(pid: int, mark: bytes) -> bool:
    """Whether the process lives, and `mark` is one of the words of its command line. A zombie does not live."""
    try:
        words = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return mark in words and _fields(pid)[:1] not in ([], ["Z"], ["X"])


def find(mark: bytes) -> int | None:
    """The process whose command line has that word."""
    numbers = (int(path.name) for path in _PROC.iterdir() if path.name.isdigit())
    return next((pid for pid in numbers if running(pid, mark)), None)


def started(pid: int) -> int | None:
    """When the process began, in ticks since boot: with its number it names the process. None where it is gone."""
    fields = _fields(pid)
    return int(fields[19]) if len(fields) > 19 and fields[0] not in ("Z", "X") else None


def usage(pid: int) -> tuple[float, int] | None:
    """CPU seconds and resident bytes; None where it is gone."""
    fields = _fields(pid)
    if len(fields) <= 21:
        return None
    return (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[21]) * _PAGE


def descendants(pid: int) -> list[int]:
    """The process and everything that it started and that is still its child, parents first."""
    children: dict[int, list[int]] = {}
    for path in _PROC.iterdir():
        if path.name.isdigit():
            fields = _fields(int(path.name))
            if len(fields) > 1:
                children.setdefault(int(fields[1]), []).append(int(path.name))
    found = [pid]
    for one in found:
        found.extend(children.get(one, []))
    return found


def kill(pid: int) -> None:
    """SIGKILL; no error where it is gone."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


async def wait_gone(pid: int, mark: bytes, timeout_s: float) -> bool:
    """Wait until the process is gone; False where it is still there after `timeout_s`."""
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    while running(pid, mark):
        if loop.time() >= end:
            return False
        await asyncio.sleep(_LOOK_S)
    return True


def _fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on: the name before it may contain anything."""
    try:
        return (_PROC / str(pid) / "stat").read_text("latin-1").rpartition(")")[2].split()
    except OSError:
        return []
