"""What engine processes share: the socket they appear at, their command line, and dying with their parent."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import sys
from pathlib import Path

from engine.network import SECRET_VARIABLE, STRANGER_S

EXIT_CANNOT_START = 3
"""Exit status of a process that will not start however often it is tried: a bad configuration or model."""
EXIT_STUCK = 4
"""Exit status of an engine one of whose steps did not end."""
LISTENING = "listening at "
"""Begins the line on standard output that says at which address on the network a process is ready."""
LARGEST_ADDRESS = 107
"""Most bytes in the path of a Unix socket (sun_path, less the final zero)."""


def arguments(description: str, *, network: bool = False) -> argparse.ArgumentParser:
    """The options that every engine process understands, and with `network` those of one that may listen there."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--socket", type=Path, required=not network, help="Unix socket to serve; it appears when ready")
    if network:
        parser.add_argument(
            "--listen",
            metavar="HOST:PORT",
            help="address on a private network to serve, port 0 for a free one; written to standard output when "
            f"ready. Callers need the secret that is in {SECRET_VARIABLE}; nothing is encrypted",
        )
        parser.add_argument(
            "--stranger-s", type=float, default=STRANGER_S, help="seconds that a caller has to prove that it knows it"
        )
    parser.add_argument("--config", default="{}", help="EngineConfig as JSON")
    parser.add_argument(
        "--drain-s", type=float, default=30.0, help="on SIGTERM, seconds for running requests to finish"
    )
    parser.add_argument("--grace-s", type=float, default=0.0, help="seconds that requests outlive a lost connection")
    parser.add_argument("--buffer-mib", type=float, default=16.0, help="unread output at which a connection is dropped")
    parser.add_argument("--parent", type=int, default=0, help="process to die with; 0 is the one that started this")
    return parser


def listen(path: Path) -> socket.socket:
    """Return a non-blocking socket that listens at `path`, readable by this user alone.

    The path appears only when connections are accepted: the socket is bound beside it and renamed, which also replaces
    a stale one. Raises OSError, ValueError when the path is too long.
    """
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    if len(os.fsencode(beside)) > LARGEST_ADDRESS:
        raise ValueError(f"the path of the socket is too long for a Unix socket ({LARGEST_ADDRESS} bytes): {path}")
    beside.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        mask = os.umask(0o177)
        try:
            listener.bind(os.fspath(beside))
        finally:
            os.umask(mask)
        listener.listen(128)
        listener.setblocking(False)
        beside.rename(path)
    except OSError:
        listener.close()
        beside.unlink(missing_ok=True)
        raise
    return listener


def remove(path: Path, inode: int) -> None:
    """Unlink the socket at `path` if it is still the one with this inode (a successor may have replaced it)."""
    try:
        if path.stat().st_ino == inode:
            path.unlink()
    except FileNotFoundError:
        pass


def die_with_parent(parent: int) -> int:
    """Have the kernel kill this process when its parent ends; return the parent's process id.

    `parent` 0 means the present one. Exits at once when the parent is gone already. Where the kernel has no such
    service, orphaned() has to be asked.
    """
    parent = parent or os.getppid()
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if orphaned(parent):  # it may have died before the call above
        raise SystemExit(0)
    return parent


def orphaned(parent: int) -> bool:
    """True when the process that started this one is gone."""
    return os.getppid() != parent
