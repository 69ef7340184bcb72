"""podman's REST service, started by the agent with settings that fit the host, and with storage of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from marketplace.agent.drivers.base import DriverError
from marketplace.agent.drivers.podman_runtime import SOCKET, end_former, hold, runtime_folder, sweep, tidy

_START_S = 20.0
_LOOK_S = 0.05


class PodmanService:
    """One `podman system service` below one folder."""

    def __init__(self, folder: Path, *, insecure: Sequence[str] = ()) -> None:
        """`insecure` are registries without TLS."""
        self.socket = runtime_folder(folder) / SOCKET
        self._folder = folder
        self._insecure = insecure
        self._process: asyncio.subprocess.Process | None = None
        self._held: int | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Start it, unless it runs; at first remove what agents left that were killed. Raises DriverError."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                await self._start()

    async def _start(self) -> None:
        if shutil.which("podman") is None:
            raise DriverError("PlatformError", "podman: not found; install it")
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder, short = self._folder.resolve(), self.socket.parent
        if self._held is None:
            self._held = await hold(short, folder)
            await asyncio.to_thread(sweep, short)
        end_former(self.socket)
        self.socket.unlink(missing_ok=True)
        (folder / "containers.conf").write_text(containers_conf(_file_limit()))
        (folder / "registries.conf").write_text(registries_conf(self._insecure))
        (folder / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}\n')
        environment = {
            **os.environ,
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "CONTAINERS_REGISTRIES_CONF": str(folder / "registries.conf"),
            "REGISTRY_AUTH_FILE": str(folder / "auth.json"),
        }
        words = ["podman", "--root", str(folder / "storage"), "--runroot", str(short)]
        words += ["system", "service", "--time", "0", f"unix://{self.socket}"]
        with (folder / "podman.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *words,
                cwd=folder,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        await self._listening()

    async def stop(self) -> None:
        """Stop the service. Containers keep running, and what they need stays; where there are none, nothing does."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            await self._process.wait()
        self._process = None
        self.socket.unlink(missing_ok=True)
        if self._held is not None:
            try:
                await asyncio.to_thread(tidy, self.socket.parent, self._folder.resolve())
            finally:
                os.close(self._held)
                self._held = None

    async def _listening(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + _START_S
        assert self._process is not None
        while not self.socket.exists():
            if self._process.returncode is not None or loop.time() > end:
                tail = (self._folder / "podman.log").read_text("utf-8", "replace")[-2000:]
                raise DriverError("PlatformError", "podman's service does not start.", tail)
            await asyncio.sleep(_LOOK_S)


def containers_conf(file_limit: int) -> str:
    """Settings for containers of strangers.

    Control groups are managed through their files: under systemd a reload takes GPUs from running containers. runc is
    named because crun refuses hosts with both versions of control groups; and where the agent may not raise limits, a
    container is given those that there are.
    """
    runtime = "runc" if shutil.which("runc", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") else "crun"
    return (
        "[containers]\n"
        f'default_ulimits = ["nofile={file_limit}:{file_limit}", "nproc=4096:4096"]\n'
        'log_driver = "k8s-file"\n'
        "log_size_max = 1048576\n"
        "[engine]\n"
        f'runtime = "{runtime}"\n'
        'cgroup_manager = "cgroupfs"\n'
        'events_logger = "file"\n'
    )


def registries_conf(insecure: Sequence[str]) -> str:
    """Where short names are looked up, and which registries have no TLS."""
    text = 'unqualified-search-registries = ["docker.io"]\nshort-name-mode = "disabled"\n'
    for location in insecure:
        text += f'[[registry]]\nlocation = "{location}"\ninsecure = true\n'
    return text


def _file_limit() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
