"""`headrace serve`: the process from its first line to its exit status."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop
from sqlalchemy.exc import SQLAlchemyError

from engine.weights.errors import WeightsError
from engine.weights.progress import TerminalProgress
from engine.weights.sources import default_cache_dir, resolve
from gateway.app import Gateway, wall_us
from gateway.bootstrap import BootstrapError, FirstRun, Prepared, PriceTag, lock, prepare
from gateway.fleet.budget import NeverFitsError
from gateway.fleet.offers import Served, offers_of
from gateway.fleet.replicas import StartError
from gateway.metering.clerk import ClerkError
from gateway.metering.journal import JournalDamagedError, JournalInUseError, JournalUnavailableError
from gateway.payments import payments_of
from gateway.server import bind, make_server
from gateway.settings import Paths, SettingError, Settings

EXIT_OK = 0
EXIT_FAILED = 1


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status. What goes wrong at the start is said in one line."""
    logging.basicConfig(
        stream=sys.stderr,
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    paths = Paths(settings.data)
    try:
        settings.check()
        payments = payments_of(os.environ)
        with lock(paths), _bind(settings) as listener:
            served = _fetch(settings)
            base_url = _base_url(settings.host, listener.getsockname()[1])
            told = msgspec.structs.replace(settings, public_url=settings.public_url or base_url)
            gateway = Gateway(told, served, payments=payments)
            return uvloop.run(_run(gateway, listener, served, base_url))
    except (BootstrapError, WeightsError, SettingError, NeverFitsError) as error:
        return _fail(str(error))
    except StartError as error:
        return _fail(f"the engine does not start: {error} (its log is {paths.engine_log()})")
    except (JournalInUseError, JournalDamagedError, JournalUnavailableError, ClerkError) as error:
        return _fail(str(error))
    except (SQLAlchemyError, OSError) as error:
        return _fail(f"{type(error).__name__}: {error}")


def _bind(settings: Settings) -> socket.socket:
    try:
        return bind(settings.host, settings.port)
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        if error.errno == errno.EADDRINUSE:
            raise BootstrapError(f"something else listens on {where} already; choose another --port") from error
        raise BootstrapError(f"cannot listen on {where}: {error.strerror or error}") from error


def _fetch(settings: Settings) -> list[Served]:
    """Find the files of every model, which may have to be fetched. Raises SettingError, WeightsError."""
    found: list[Served] = []
    for offer in offers_of(settings):
        engine = offer.engine
        cache = Path(engine.cache_dir).expanduser() if engine.cache_dir else default_cache_dir()
        with TerminalProgress() as progress:
            source = resolve(engine.model, cache, progress)
        found.append(Served(name=engine.served_name or source.name, source=source, offer=offer))
    return found


async def _run(gateway: Gateway, listener: socket.socket, served: Sequence[Served], base_url: str) -> int:
    settings, name = gateway.settings, ", ".join(one.name for one in served)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    print(f"Loading {name} …", file=sys.stderr, flush=True)
    started = loop.create_task(_start(gateway, served, base_url))
    stopped = loop.create_task(stop.wait())
    try:
        await asyncio.wait({started, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            started.cancel()
            await asyncio.wait({started})
            return EXIT_OK
        prepared = started.result()
        settle_memory()
        server = make_server(
            gateway.app(),
            backlog=settings.backlog,
            drain_s=settings.drain_s,
            trusted_proxies=settings.proxies,
            burst=gateway.burst,
        )
        server.on_listening = lambda: _announce(settings, prepared.first, [one.name for one in served], base_url)
        serving = loop.create_task(server.serve(sockets=[listener]))
        await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            print("Stopping: running requests finish first …", file=sys.stderr, flush=True)
            gateway.part()
            server.should_exit = True
            stop.clear()
            hurry = loop.create_task(stop.wait())  # a second signal does not wait for them
            await asyncio.wait({serving, hurry}, return_when=asyncio.FIRST_COMPLETED)
            server.force_exit = True
            hurry.cancel()
        await serving
        return EXIT_OK
    finally:
        stopped.cancel()
        await gateway.stop()


async def _start(gateway: Gateway, served: Sequence[Served], base_url: str) -> Prepared:
    """Load the engine and open the books at the same time, but not at the first start.

    An engine that cannot start must not leave secrets behind that nobody was shown. One that leases its GPU may come
    much later.
    """
    settings = gateway.settings
    gateway.launch()
    if not settings.lease_socket and not Paths(settings.data).first_run.exists():
        await gateway.fleet.ready()
    tags = [
        PriceTag(one.name, one.offer.price_prompt, one.offer.price_cached, one.offer.price_completion) for one in served
    ]
    prepared = await asyncio.to_thread(prepare, settings, served[0].name, base_url, clock=wall_us, tags=tags)
    await gateway.start(prepared)
    return prepared


def settle_memory() -> None:
    """Spare the garbage collector what lives as long as the process: vocabularies and modules are a million objects.

    A full collection would look at each of them and stop every stream for its time. And requests make few cycles: the
    young generation may grow larger than the default 700 objects, which a single request allocates.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


def _announce(settings: Settings, first: FirstRun | None, names: Sequence[str], base_url: str) -> None:
    """Say where it is; the secrets are shown at the first start only."""
    lines = [f"Headrace serves {', '.join(names)} at {base_url}", ""]
    if settings.lease_socket:
        lines += [
            f"The engine leases its GPU at {settings.lease_socket}; {base_url}/readyz tells what it waits for",
            "",
        ]
    path = Paths(settings.data).first_run
    if first is None:
        if path.exists():
            lines.append(f"The first admin and the first API key are in {path}")
    else:
        lines += [
            f"  admin e-mail    {first.admin_email}",
            f"  admin password  {first.admin_password}",
            f"  API key         {first.api_key}",
            "",
            f"They are shown this once, and kept in {path}",
            "",
            curl(first, names[0]),
        ]
    print("\n".join(lines).rstrip() + "\n", flush=True)


def curl(first: FirstRun, model: str) -> str:
    """A command that asks the first question."""
    question = {"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    return shlex.join(
        [
            "curl",
            f"{first.base_url}/chat/completions",
            "-H",
            f"Authorization: Bearer {first.api_key}",
            "-H",
            "Content-Type: application/json",
            "-d",
            msgspec.json.encode(question).decode(),
        ]
    )


def _base_url(host: str, port: int) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def _fail(message: str) -> int:
    print(f"headrace: {message}", file=sys.stderr, flush=True)
    return EXIT_FAILED
