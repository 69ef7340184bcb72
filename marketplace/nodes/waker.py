"""Who waits for a node's revision to change is woken soon after it does, in whichever process it was changed.

One statement on a connection that stays open looks at all revisions, a few times a second and only while somebody
waits: however many agents wait, they hold neither a thread nor a connection each.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from sqlalchemy import PoolProxiedConnection
from sqlalchemy.exc import SQLAlchemyError

from marketplace.store.db import Database

log = logging.getLogger(__name__)

LOOK_S = 0.2
_SELECT = "SELECT id, desired_rev FROM node WHERE deleted_at IS NULL"


class Waker:
    """Watches the revisions of one database. Belongs to one event loop."""

    def __init__(self, database: Database, look_s: float = LOOK_S) -> None:
        self._database = database
        self._look_s = look_s
        self._waiting: dict[asyncio.Future[None], tuple[str, int]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._held: PoolProxiedConnection | None = None
        self._closed = False

    async def wait(self, node_id: str, revision: int, seconds: float) -> None:
        """Return when the node's revision is not the given one, or after so many seconds."""
        if self._closed or seconds <= 0:
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[woken] = (node_id, revision)
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch(), name="node revisions")
        try:
            async with asyncio.timeout(seconds):
                await woken
        except TimeoutError:
            return
        finally:
            self._waiting.pop(woken, None)

    def close(self) -> None:
        """Wake everybody, now and from now on: the server goes."""
        self._closed = True
        for woken in list(self._waiting):
            if not woken.done():
                woken.set_result(None)

    async def _watch(self) -> None:
        try:
            while self._waiting and not self._closed:
                try:
                    self._wake(await asyncio.to_thread(self._revisions))
                except (SQLAlchemyError, OSError, self._database.driver_error) as error:
                    log.warning("revisions of nodes cannot be read: %s", error)
                    self._let_go()
                await asyncio.sleep(self._look_s)
        finally:
            self._let_go()

    def _wake(self, revisions: dict[str, int]) -> None:
        for woken, (node_id, revision) in list(self._waiting.items()):
            if revisions.get(node_id) != revision and not woken.done():
                woken.set_result(None)

    def _revisions(self) -> dict[str, int]:
        if self._held is None:
            self._held = self._database.connection()
            if self._database.dialect != "sqlite":
                driver: Any = self._held.driver_connection
                driver.autocommit = True  # each look is its own
        cursor = self._held.cursor()
        cursor.execute(_SELECT)
        found = dict(cursor.fetchall())
        cursor.close()
        return found

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.invalidate()
