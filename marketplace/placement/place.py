"""Placing in the database: look, choose, and claim only if nothing changed in between; else look again."""

from __future__ import annotations

from collections.abc import Callable

from marketplace.placement import claims, load
from marketplace.placement.choose import NoPlace, Placement, Wanted, choose
from marketplace.store.db import WriteUnit

ATTEMPTS = 10


class CrowdedError(Exception):
    """Others claimed on the chosen nodes again and again; the same request may succeed a moment later."""


def place(unit: WriteUnit, wanted: Wanted, now: int) -> Placement | NoPlace:
    """Find a place and lock its node until the unit ends. The caller writes what it places, then `claims.take`.

    On PostgreSQL two who chose the same node meet at its row: the second sees another generation there, and looks
    again at what is left. CrowdedError after ATTEMPTS times.
    """
    return _attempt(unit, lambda: _look(unit, wanted, now))


def _look(unit: WriteUnit, wanted: Wanted, now: int) -> Placement | NoPlace:
    nodes = load.views(unit, now, None if wanted.node_id is None else [wanted.node_id])
    return choose(nodes, wanted)


def _attempt(unit: WriteUnit, look: Callable[[], Placement | NoPlace]) -> Placement | NoPlace:
    for _ in range(ATTEMPTS):
        found = look()
        if isinstance(found, NoPlace):
            return found
        try:
            claims.bump(unit, found.node.id, found.node.generation)
        except claims.StaleError:
            continue
        return found
    raise CrowdedError(f"{ATTEMPTS} attempts to claim were overtaken")
