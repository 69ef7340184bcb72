"""QEMU's control socket: one command, one answer, events in between.

A socket's address may have 107 bytes and a folder's path may have more, so it is reached through the folder's
descriptor.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any


class QmpError(Exception):
    """QEMU does not answer, or refuses."""


class Qmp:
    """A connection for a few commands: `async with Qmp(path) as qmp`."""

    def __init__(self, path: Path, *, timeout_s: float = 10.0) -> None:
        """`timeout_s` bounds the greeting and each answer."""
        self._path = path
        self._timeout_s = timeout_s
        self.events: list[str] = []

    async def __aenter__(self) -> Qmp:
        """Connect. Raises QmpError."""
        try:
            async with asyncio.timeout(self._timeout_s):
                self._reader, self._writer = await _connect(self._path)
                await self._message()
        except (OSError, TimeoutError) as error:
            raise QmpError(f"{self._path}: {error or 'no greeting'}") from error
        await self.execute("qmp_capabilities")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self._writer.close()

    async def execute(self, command: str, **arguments: Any) -> Any:
        """Run a command and return its answer. Raises QmpError."""
        message: dict[str, Any] = {"execute": command}
        if arguments:
            message["arguments"] = {name.replace("_", "-"): value for name, value in arguments.items()}
        try:
            async with asyncio.timeout(self._timeout_s):
                self._writer.write(json.dumps(message).encode() + b"\n")
                await self._writer.drain()
                while True:
                    answer = await self._message()
                    if "event" in answer:
                        self.events.append(answer["event"])
                    elif "error" in answer:
                        raise QmpError(f"{command}: {answer['error'].get('desc')}")
                    else:
                        return answer.get("return")
        except (OSError, TimeoutError) as error:
            raise QmpError(f"{command}: {error or 'no answer'}") from error

    async def _message(self) -> dict[str, Any]:
        line = await self._reader.readline()
        if not line:
            raise QmpError("QEMU closed its control socket")
        found = json.loads(line)
        assert isinstance(found, dict)
        return found


async def _connect(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        return await asyncio.open_unix_connection(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
