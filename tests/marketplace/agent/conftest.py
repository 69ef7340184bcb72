"""Real machines: a guest's disk, a renter's key, and a node whose keeper a test drives."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pynvml
import pytest

from tests.marketplace.agent.nvml_library import Library

_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def _load(name: str) -> ModuleType:
    """A module beside this one: tests are no packages."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def registry() -> ModuleType:
    """The module of a small registry of images."""
    missing = [tool for tool in ("podman", "runc", "busybox") if not shutil.which(tool, path=_PATH)]
    assert not missing, f"tests of containers need {', '.join(missing)} (.ci/run installs them)"
    return _load("registry")


@pytest.fixture(scope="session")
def guest_disk() -> Path:
    """A bootable disk image."""
    disk: Path = _load("guest").guest_disk()
    return disk


class Renter:
    """Somebody with an SSH key."""

    def __init__(self, folder: Path) -> None:
        self.key = folder / "renter"
        quiet = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "renter", "-f", str(self.key)]
        subprocess.run(quiet, check=True)
        self.public = self.key.with_suffix(".pub").read_text().strip()

    async def ssh(self, port: int, command: str, *, within_s: float = 90) -> str:
        """What a command on the guest prints."""
        words = ["ssh", "-i", str(self.key), "-p", str(port), "-o", "StrictHostKeyChecking=no", "-o", "BatchMode=yes"]
        words += ["-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR", "-o", "ConnectTimeout=10"]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *words, "root@127.0.0.1", command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )
        async with asyncio.timeout(within_s):
            said, complaint = await process.communicate()
        assert process.returncode == 0, complaint
        return said.decode().strip()


@pytest.fixture(scope="session")
def renter(tmp_path_factory: pytest.TempPathFactory) -> Renter:
    """A person with a key."""
    return Renter(tmp_path_factory.mktemp("renter"))


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def port() -> int:
    """A free port of this machine."""
    return free_port()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """A driver's library of one GPU, in the place of the real one: pynvml itself is the real one."""
    made = Library()
    monkeypatch.setattr(pynvml, "nvmlLib", made)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return made
