"""`headrace relay`: a relay from its first line to its exit status."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from marketplace.relay.grants import SECRET_BYTES
from marketplace.relay.options import SECRET, RelaySettings
from marketplace.relay.relay import Relay

_log = logging.getLogger(__name__)

_SWEEP_S = 1.0


class RelayError(Exception):
    """The relay cannot start. The message says why, in one line, and holds no secret."""


def run(settings: RelaySettings) -> int:
    """Run the relay until SIGTERM or SIGINT; return the exit status."""
    logging.basicConfig(
        stream=sys.stderr,
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        if settings.port in settings.ports:
            raise RelayError(f"--port {settings.port} is among the published ones")
        asyncio.run(_run(settings, load_secret(os.environ, settings.secret_file)))
    except (RelayError, OSError) as error:
        print(f"headrace relay: {error}", file=sys.stderr)
        return 1
    return 0


def load_secret(environment: Mapping[str, str], file: Path | None) -> bytes:
    """The secret that the relay shares with the server. RelayError."""
    text, where = environment.get(SECRET, "").strip(), SECRET
    if not text:
        if file is None:
            raise RelayError(
                f"there is no secret: set {SECRET}, or write it to a file and name that with --secret-file"
            )
        where = str(file)
        try:
            text = file.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise RelayError(f"{file} cannot be read: {type(error).__name__}") from error
    try:
        secret = bytes.fromhex(text)
    except ValueError as error:
        raise RelayError(f"{where} is no secret of a relay: those are hexadecimal") from error
    if len(secret) != SECRET_BYTES:
        raise RelayError(f"{where} is no secret of a relay: those have {SECRET_BYTES * 2} digits")
    return secret


async def _run(settings: RelaySettings, secret: bytes) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    relay = Relay(secret, settings.ports, publish=settings.publish, now=lambda: time.time_ns() // 1000)
    port = await relay.start(settings.listen, settings.port)
    _log.info("listening for nodes on %s, port %d", settings.listen, port)
    try:
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SWEEP_S):
                    await stop.wait()
            relay.sweep()
    finally:
        await relay.close()
