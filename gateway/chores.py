"""What the marketplace does beside requests: its workers, run at intervals in a thread of their own.

The thread has its own event loop, so that neither a slow mail server nor a long query delays a stream. Each worker is
a pass that may be killed at any line and run again; here is only when.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable

import msgspec

from gateway.settings import Paths, Settings
from marketplace.http.operation import Context
from marketplace.notify.mail import FolderMail, Mail, SmtpMail, read_sender, read_smtp_url
from marketplace.workers import expiry
from marketplace.workers.fleet import Fleet
from marketplace.workers.funds import FundsWatch
from marketplace.workers.metering import Metering
from marketplace.workers.outbox import Deliverer
from marketplace.workers.payments import reconcile
from marketplace.workers.volumes import VolumeKeeper

log = logging.getLogger(__name__)

MAIL_S = 1.0
FUNDS_S = 5.0
FLEET_S = 2.0
METERING_S = 5.0
PAYMENTS_S = 10.0
RESERVATIONS_S = 5.0
VOLUMES_S = 30.0
ENVIRONMENTS_S = 10.0
TIDY_S = 3600.0
STOP_S = 5.0
"""How long a letter that is just being handed over may take at the end; it is sent again if it did not make it."""


class Chore(msgspec.Struct, frozen=True):
    """One worker: what it is called, how long it rests between two passes, and its pass."""

    name: str
    every_s: float
    run: Callable[[], Awaitable[object]]


class Chores:
    """The thread that runs them."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._main, name="chores", daemon=True)
        self._chores: tuple[Chore, ...] = ()

    @property
    def stopping(self) -> bool:
        """Whether passes should come to their end."""
        return self._stop.is_set()

    def start(self, chores: tuple[Chore, ...]) -> None:
        """Begin; every chore has its first pass at once."""
        self._chores = chores
        self._thread.start()

    def stop(self, limit_s: float = STOP_S) -> None:
        """Let running passes end, cut off what takes longer than `limit_s`, and return when the thread has ended."""
        if not self._thread.is_alive():
            if not self._loop.is_closed():
                self._loop.close()
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._cancel)
            self._thread.join()

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._all())
            except asyncio.CancelledError:
                log.warning("a chore was cut off")

    async def _all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for chore in self._chores:
                group.create_task(self._repeat(chore), name=chore.name)

    def _cancel(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    async def _repeat(self, chore: Chore) -> None:
        while not self._stop.is_set():
            try:
                await chore.run()
            except Exception:  # supervision boundary: a worker that fails once must not end for ever
                log.exception("%s failed; it goes on in %g s", chore.name, chore.every_s)
            try:
                async with asyncio.timeout(chore.every_s):
                    await self._stop.wait()
            except TimeoutError:
                continue


def mail_of(settings: Settings) -> Mail:
    """How this gateway sends mail: through the SMTP server of its settings, or into the data folder."""
    sender = read_sender(settings.mail_from)
    if not settings.smtp_url:
        return FolderMail(Paths(settings.data).mail, sender)
    return SmtpMail(read_smtp_url(settings.smtp_url), sender)


def marketplace_chores(context: Context, mail: Mail, chores: Chores) -> tuple[Chore, ...]:
    """The workers of the marketplace, which end with `chores`."""
    deliverer = Deliverer(
        context.database,
        mail,
        platform=context.platform,
        public_url=context.public_url,
        clock=context.clock,
        random=context.random,
    )
    funds = FundsWatch(context.database, clock=context.clock, random=context.random)
    reservations = expiry.of_reservations(context.database, clock=context.clock, random=context.random)
    volumes = VolumeKeeper(context.database, clock=context.clock, random=context.random)
    environments = expiry.of_environments(context.database, clock=context.clock, random=context.random)

    fleet = Fleet(context.database, clock=context.clock, random=context.random)
    metering = Metering(context.database, clock=context.clock, random=context.random)

    async def deliver() -> None:
        await deliverer.run(lambda: chores.stopping)

    async def watch_fleet() -> None:
        fleet.run()

    async def meter_rentals() -> None:
        metering.run()

    async def watch_funds() -> None:
        funds.run()

    async def settle_payments() -> None:
        # In another thread: a payment provider that hangs delays no mail.
        await asyncio.to_thread(reconcile, context, lambda: chores.stopping)

    async def end_reservations() -> None:
        reservations.run(lambda: chores.stopping)

    async def keep_volumes() -> None:
        volumes.run(lambda: chores.stopping)

    async def end_environments() -> None:
        environments.run(lambda: chores.stopping)

    async def tidy() -> None:
        deliverer.tidy()

    return (
        Chore("mail", MAIL_S, deliver),
        Chore("funds", FUNDS_S, watch_funds),
        Chore("fleet", FLEET_S, watch_fleet),
        Chore("metering", METERING_S, meter_rentals),
        Chore("payments", PAYMENTS_S, settle_payments),
        Chore("reservations", RESERVATIONS_S, end_reservations),
        Chore("volumes", VOLUMES_S, keep_volumes),
        Chore("environments", ENVIRONMENTS_S, end_environments),
        Chore("tidy", TIDY_S, tidy),
    )
