"""What podman keeps until the machine's next start: a folder below `/run`, its service, and what it has mounted.

Containers live on without an agent, and need all of it. Where there are none, it is removed: by the agent when it ends,
and by the next one of the same machine where an agent was killed. Whose it is says a file in the folder, which an agent
keeps locked for as long as it lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from pathlib import Path

from marketplace.agent.drivers.base import DriverError
from marketplace.agent.drivers.disk_quota import plain

_log = logging.getLogger(__name__)

SOCKET = "podman.sock"
_OWNER = "owner"
_PREFIX = "headrace-"
_HOLD_S = 20.0
_LEAVE_S = 2.0
_LOOK_S = 0.05
_END_MS = 5_000


def runtime_folder(folder: Path) -> Path:
    """Where podman keeps what does not outlive the machine's start: it takes no path of more than 50 characters."""
    named = _PREFIX + hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
    return _base() / named


def _base() -> Path:
    return Path("/run" if os.access("/run", os.W_OK) else tempfile.gettempdir())


async def hold(runtime: Path, folder: Path) -> int:
    """Make the runtime folder of a folder and hold it: nobody else tidies it until the descriptor is closed, or the
    process ends. DriverError where somebody holds it for long."""
    loop = asyncio.get_running_loop()
    end = loop.time() + _HOLD_S
    while (held := _try(runtime, make=True)) is None:
        if loop.time() > end:
            raise DriverError("PlatformError", f"another agent uses {runtime}")
        await asyncio.sleep(_LOOK_S)
    os.ftruncate(held, 0)
    os.pwrite(held, os.fsencode(folder), 0)
    return held


def sweep(mine: Path) -> list[Path]:
    """Remove what agents of this machine left when they were killed, beside one's own; returns what is gone now."""
    return [one for one in sorted(mine.parent.glob(_PREFIX + "*")) if one != mine and _sweep(one)]


def tidy(runtime: Path, folder: Path) -> bool:
    """Remove the runtime folder of a folder, which the caller holds, with what is mounted for it, unless there are
    containers. Says whether it is gone."""
    if _has_containers(runtime, folder):
        return False
    end_former(runtime / SOCKET)
    if _has_containers(runtime, folder) or not _unnamed(runtime):
        return False  # made at the last moment
    for point in sorted(_mounted(runtime, folder), key=lambda point: len(point.parts), reverse=True):
        if subprocess.run(["umount", point], check=False, capture_output=True).returncode:
            return False  # somebody uses it
    shutil.rmtree(runtime, ignore_errors=True)
    return not runtime.exists()


def end_former(path: Path) -> None:
    """Kill who listens there: the service of an agent that was killed, which would stay for ever. One that is asked to
    end takes the socket of its successor with it."""
    with socket.socket(socket.AF_UNIX) as former:
        try:
            former.connect(str(path))
        except OSError:
            return
        found = former.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", found)[0]
    with contextlib.suppress(OSError):  # it has just ended by itself
        process = os.pidfd_open(pid)
        try:
            if os.fsencode(path) in Path(f"/proc/{pid}/cmdline").read_bytes():
                signal.pidfd_send_signal(process, signal.SIGKILL)
                poller = select.poll()
                poller.register(process, select.POLLIN)
                poller.poll(_END_MS)
        finally:
            os.close(process)


def _sweep(runtime: Path) -> bool:
    """Tidy a folder whose agent is gone. What does not say whose it is, is left alone."""
    try:
        found = runtime.lstat()
        if found.st_uid != os.geteuid() or not runtime.is_dir() or runtime.is_symlink():
            return False
        held = _try(runtime, make=False)
    except OSError:
        return False
    if held is None:
        return False
    try:
        folder = Path(os.fsdecode(os.pread(held, 4096, 0)))
        gone = runtime_folder(folder) == runtime and tidy(runtime, folder)
    except OSError as error:
        _log.warning("%s cannot be tidied: %s", runtime, error)
        gone = False
    finally:
        os.close(held)
    if gone:
        _log.info("removed %s, which an agent on %s had left", runtime, folder)
    return gone


def _try(runtime: Path, *, make: bool) -> int | None:
    """A locked descriptor of the file that says whose a runtime folder is; None where somebody else holds it."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if make else 0)
    if make:
        runtime.mkdir(exist_ok=True, mode=0o700)
    path = runtime / _OWNER
    try:
        held = os.open(path, flags, 0o600)
    except FileNotFoundError:
        return None  # somebody tidied it between the two lines
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(held).st_ino == path.stat().st_ino:
            return held
    except (BlockingIOError, FileNotFoundError):
        pass  # held by somebody, or removed by them meanwhile
    os.close(held)
    return None


def _has_containers(runtime: Path, folder: Path) -> bool:
    """Whether podman's storage knows any container; what cannot be read might."""
    lists = [*folder.glob("storage/*-containers/*containers.json"), *runtime.glob("*-containers/*containers.json")]
    for path in lists:
        try:
            if json.loads(path.read_bytes() or b"[]"):
                return True
        except (OSError, ValueError):
            return True
    return False


def _unnamed(runtime: Path) -> bool:
    """Whether no process uses the folder any more; those of a container that was just removed need a moment."""
    end = time.monotonic() + _LEAVE_S
    while _is_named(runtime):
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK_S)
    return True


def _is_named(runtime: Path) -> bool:
    """Whether a process was started with the folder among its words: who watches over a container is."""
    word = os.fsencode(runtime)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has just ended
            if word in path.read_bytes():
                return True
    return False


def _mounted(*folders: Path) -> set[Path]:
    """Everything that is mounted at these folders and below."""
    lines = Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines()
    points = {Path(plain(line.split()[4])) for line in lines}
    return {point for point in points if any(point.is_relative_to(folder) for folder in folders)}
