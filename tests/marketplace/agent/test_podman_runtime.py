"""What podman leaves until the machine's next start: removed where nobody needs it, and left where anybody might."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from marketplace.agent.drivers import podman_runtime
from marketplace.agent.drivers.base import DriverError
from marketplace.agent.drivers.podman_runtime import SOCKET, hold, runtime_folder, sweep, tidy

LISTEN = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); print(1, flush=True)"
_LISTS = "storage/overlay-containers/containers.json"


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where runtime folders are: not below pytest's, whose paths are too long for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="hr-"))
    monkeypatch.setattr(podman_runtime, "_base", lambda: folder)
    monkeypatch.setattr(podman_runtime, "_LEAVE_S", 0)
    monkeypatch.setattr(podman_runtime, "_HOLD_S", 0)
    yield folder
    shutil.rmtree(folder)


def left(folder: Path, containers: str | None = None) -> Path:
    """What an agent on that folder left when it was killed."""
    runtime = runtime_folder(folder)
    os.close(asyncio.run(hold(runtime, folder)))
    (runtime / "overlay-locks").mkdir()
    if containers is not None:
        path = folder / _LISTS
        path.parent.mkdir(parents=True)
        path.write_text(containers)
    return runtime


def test_what_a_killed_agent_left_is_removed_with_its_service(base: Path, tmp_path: Path) -> None:
    mine, dead = runtime_folder(tmp_path / "mine"), left(tmp_path / "dead", "[]")
    held = asyncio.run(hold(mine, tmp_path / "mine"))
    command = [sys.executable, "-c", f"{LISTEN}; s.accept(); s.accept()", dead / SOCKET]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as service:
        assert service.stdout is not None and service.stdout.readline() == b"1\n"
        assert sweep(mine) == [dead] and service.wait(30) == -signal.SIGKILL
    assert mine.is_dir() and not dead.exists() and sweep(mine) == []
    os.close(held)


@pytest.mark.parametrize("containers", [json.dumps([{"id": "86ee"}]), "torn"])
def test_what_containers_need_stays(base: Path, tmp_path: Path, containers: str) -> None:
    dead = left(tmp_path / "dead", containers)
    assert sweep(base / "mine") == [] and dead.is_dir()
    (tmp_path / "dead" / _LISTS).write_text("")
    watch = [sys.executable, "-c", "print(1, flush=True); input()", dead]
    with subprocess.Popen(watch, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"1\n"
        assert sweep(base / "mine") == [] and dead.is_dir(), "somebody watches over a container"
        process.communicate(b"\n")
    assert sweep(base / "mine") == [dead]


def test_what_another_agent_holds_or_nobody_names_is_left_alone(base: Path, tmp_path: Path) -> None:
    other, moved, unnamed = left(tmp_path / "other"), left(tmp_path / "moved"), base / "headrace-unnamed"
    unnamed.mkdir()
    (base / "headrace-link").symlink_to(unnamed)
    renamed = moved.rename(base / "headrace-renamed")
    held = asyncio.run(hold(other, tmp_path / "other"))
    assert sweep(base / "mine") == []
    assert other.is_dir() and unnamed.is_dir() and renamed.is_dir(), "it is not the folder of whom it names"
    with pytest.raises(DriverError, match="another agent uses"):
        asyncio.run(hold(other, tmp_path / "other"))
    os.close(held)
    assert sweep(base / "mine") == [other]


def test_whoever_waits_for_a_folder_that_is_removed_meanwhile_makes_it_anew(base: Path, tmp_path: Path) -> None:
    runtime = left(tmp_path / "mine")
    first = os.open(runtime / "owner", os.O_RDWR)
    held = asyncio.run(hold(runtime, tmp_path / "mine"))
    assert tidy(runtime, tmp_path / "mine") and not runtime.exists()
    os.close(held)
    held = asyncio.run(hold(runtime, tmp_path / "mine"))
    assert (runtime / "owner").read_text() == str(tmp_path / "mine") and os.fstat(first).st_nlink == 0
    os.close(first)
    os.close(held)
