"""Waits for what a journal says or its thread does, instead of looking at it again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from gateway.metering.journal import Journal


class JournalWatch:
    """Listens to a journal beside those who listen already; made on the journal's loop, once they are there."""

    def __init__(self, journal: Journal) -> None:
        self.failed = asyncio.Event()
        """set when the journal has said what is lost, and refuses work"""
        self.recovered = asyncio.Event()
        """set when the journal works again, and whoever waited for that has been told"""
        journal.on_lost = _and_set(journal.on_lost, self.failed)
        journal.on_recovered = _and_set(journal.on_recovered, self.recovered)


def _and_set(callback: Callable[..., None], event: asyncio.Event) -> Callable[..., None]:
    def both(*arguments: Any) -> None:
        callback(*arguments)
        event.set()

    return both


class ThreadWatch:
    """Counts on the loop how often another thread has come back from a method of an object."""

    def __init__(self, owner: Any, name: str) -> None:
        self.count = 0
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        method = getattr(owner, name)

        def watched(*arguments: Any) -> Any:
            try:
                return method(*arguments)
            finally:
                self._loop.call_soon_threadsafe(self._came_back)

        setattr(owner, name, watched)

    def _came_back(self) -> None:
        self.count += 1
        self._changed.set()

    async def until(self, reached: Callable[[], bool]) -> None:
        """Return when something holds that only this method changes. TimeoutError after ten seconds."""
        async with asyncio.timeout(10):
            while not reached():
                self._changed.clear()
                await self._changed.wait()
