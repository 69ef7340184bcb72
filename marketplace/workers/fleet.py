"""Watches nodes and what starts on them: who falls silent, what does not get ready in time, and drains.

Each pass looks, and does every thing that is due in a transaction of its own, which looks again first: it may be killed
at any line and run again, and several may run at once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from sqlalchemy import and_, or_, select

from marketplace.events.transitions import SYSTEM, Scene, transition
from marketplace.instances import life
from marketplace.instances.tables import instance
from marketplace.nodes import draining
from marketplace.nodes import service as nodes
from marketplace.nodes.rules import CONNECTIVITY, LOST_US, OFFLINE_US, SILENT_US
from marketplace.nodes.tables import node
from marketplace.settings import service as settings
from marketplace.settings.rules import AppSettings
from marketplace.store.db import Clock, Database, ReadUnit, WriteUnit
from marketplace.store.ids import Random

SECOND = 1_000_000


class Fleet:
    """Nodes and instances of one database."""

    def __init__(self, database: Database, *, clock: Clock, random: Random) -> None:
        self._database = database
        self._clock = clock
        self._random = random

    def run(self) -> int:
        """One pass; returns how many things were done."""
        now = self._clock()
        with self._database.read() as unit:
            app = settings.current(unit)
            silent = _silent(unit, now)
            late, lost = _late(unit, app, now), _lost(unit, now)
            drains = draining.due(unit)
        work = [partial(self._fall_silent, node_id=node_id) for node_id in silent]
        work += [partial(self._give_up, place=place, app=app) for place in late]
        work += [partial(self._lose, place=place) for place in lost]
        work += [partial(self._drain, node_id=node_id) for node_id in drains]
        return sum(self._database.transact(one) for one in work)

    def _scene(self) -> Scene:
        return Scene(SYSTEM, self._clock(), self._random)

    def _fall_silent(self, unit: WriteUnit, node_id: str) -> bool:
        row, scene = nodes.lock(unit, node_id), self._scene()
        trigger = None if row is None else _step(row, scene.now)
        if trigger is None:
            return False
        transition(unit, CONNECTIVITY, row.id, row.status, trigger, scene, owner_id=row.provider_id)
        return True

    def _give_up(self, unit: WriteUnit, place: tuple[str, str], app: AppSettings) -> bool:
        scene = self._scene()
        for row in life.lock(unit, dict([place])):
            if row.status != "Initializing":
                continue
            told = _too_late(row, app, scene.now)
            if told is not None:
                life.give_up(unit, row, *told, scene)
                return True
        return False

    def _lose(self, unit: WriteUnit, place: tuple[str, str]) -> bool:
        scene = self._scene()
        for row in life.lock(unit, dict([place])):
            seen = unit.select(select(node.c.last_seen).where(node.c.id == row.node_id)).scalar_one()
            if _is_lost(row, scene.now - int(seen)):
                life.lose(unit, row, scene)
                return True
        return False

    def _drain(self, unit: WriteUnit, node_id: str) -> bool:
        row = nodes.lock(unit, node_id)
        return row is not None and draining.settle(unit, row, self._scene())


def _silent(unit: ReadUnit, now: int) -> list[str]:
    wanted = select(node.c.id).where(
        node.c.deleted_at.is_(None),
        or_(
            and_(node.c.status == "Ready", node.c.last_seen < now - SILENT_US),
            and_(node.c.status == "NotResponding", node.c.last_seen < now - OFFLINE_US),
        ),
    )
    return list(unit.select(wanted).scalars())


def _step(row: Any, now: int) -> str | None:
    if row.status == "Ready" and row.last_seen < now - SILENT_US:
        return "silent"
    if row.status == "NotResponding" and row.last_seen < now - OFFLINE_US:
        return "lost"
    return None


def _late(unit: ReadUnit, app: AppSettings, now: int) -> list[tuple[str, str]]:
    """What has not become ready in time on nodes that are heard, with the nodes."""
    ready, fetch = app.vm_readiness_timeout * SECOND, app.image_download_timeout * SECOND
    wanted = (
        select(instance.c.id, instance.c.node_id)
        .join(node, node.c.id == instance.c.node_id)
        .where(
            instance.c.ended_at.is_(None),
            instance.c.status == "Initializing",
            node.c.status == "Ready",
            or_(
                instance.c.started_at < now - ready,
                and_(instance.c.started_at.is_(None), instance.c.created_at < now - ready - fetch),
            ),
        )
    )
    return [(row.id, row.node_id) for row in unit.select(wanted)]


def _too_late(row: Any, app: AppSettings, now: int) -> tuple[str, str] | None:
    """Why it is given up: a cause, and what its renter reads."""
    if row.started_at is None:
        limit = app.vm_readiness_timeout + app.image_download_timeout
        if row.created_at < now - limit * SECOND:
            return "PlatformError", f"Its node did not start it within {limit} s: the image may be too slow to fetch."
    elif row.started_at < now - app.vm_readiness_timeout * SECOND:
        return "VmBootFailed", (
            f"The machine did not signal readiness within {app.vm_readiness_timeout} s. It signals by cloud-init, "
            "or by answering SSH: check that the image has one of them."
        )
    return None


def _lost(unit: ReadUnit, now: int) -> list[tuple[str, str]]:
    """What was starting, or being ended, on nodes that have been silent for too long, with the nodes."""
    ending = and_(instance.c.status == "Deactivating", node.c.last_seen < now - LOST_US)
    failing = and_(instance.c.status == "Deactivating", instance.c.failing, node.c.last_seen < now - OFFLINE_US)
    starting = and_(instance.c.status == "Initializing", node.c.last_seen < now - OFFLINE_US)
    wanted = (
        select(instance.c.id, instance.c.node_id)
        .join(node, node.c.id == instance.c.node_id)
        .where(instance.c.ended_at.is_(None), or_(ending, failing, starting))
    )
    return [(row.id, row.node_id) for row in unit.select(wanted)]


def _is_lost(row: Any, silence: int) -> bool:
    if row.status == "Initializing" or (row.status == "Deactivating" and row.failing):
        return silence > OFFLINE_US
    return row.status == "Deactivating" and silence > LOST_US
