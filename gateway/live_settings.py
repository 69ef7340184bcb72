"""Settings of the platform that inference goes by: changed through the management API, here within a second."""

from __future__ import annotations

import asyncio
import logging

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from gateway.inference.pipeline import Services
from marketplace.settings.cache import POLL_US, SettingsCache
from marketplace.settings.rules import AppSettings
from marketplace.store.db import Clock, Database

log = logging.getLogger(__name__)

EVERY_S = POLL_US / 1_000_000 + 0.01
"""Just longer than the cache is content with its copy: every look compares it with the database."""


class LiveSettings:
    """Takes over what is changed; a setting that is null is what the gateway was started with."""

    def __init__(self, database: Database, services: Services, clock: Clock) -> None:
        """`services` has what the gateway was started with. `clock` is in µs."""
        self._database = database
        self._services = services
        self._clock = clock
        self._cache = SettingsCache()
        self._started_with = self._quota_status = services.limits.quota_status

    async def look(self) -> None:
        """Compare once. SQLAlchemyError, OSError."""
        self._take_over(await asyncio.to_thread(self._cache.read, self._database, self._clock()))

    async def follow(self) -> None:
        """Compare for ever; a database that does not answer changes nothing."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await self.look()
            except (SQLAlchemyError, OSError) as error:
                log.warning("settings cannot be read: %s", error)

    def _take_over(self, settings: AppSettings) -> None:
        wanted = self._started_with if settings.quota_status is None else settings.quota_status
        if wanted != self._quota_status:
            services = self._services
            services.limits = msgspec.structs.replace(services.limits, quota_status=wanted)
            self._quota_status = wanted
