"""Placing in the database: look, choose, and claim only if nothing changed in between; else look again."""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter

from marketplace.placement import claims, load
from marketplace.placement.choose import NoPlace, Placement, Wanted, choose, first
from marketplace.placement.fleet import Fleet
from marketplace.store.db import ReadUnit, WriteUnit

ATTEMPTS = 10
_FREE_GPUS = attrgetter("free_gpus")


class CrowdedError(Exception):
    """Others claimed on the chosen nodes again and again; the same request may succeed a moment later."""


def look(unit: ReadUnit, fleet: Fleet, wanted: Wanted, now: int) -> Placement | NoPlace:
    """Find a place, and claim nothing.

    Only the nodes that take anything new, and have GPUs for it, are looked at; where none of them fits, all are, for
    the reasons.
    """
    if wanted.node_id is None and wanted.instance_type is not None:
        whole = 0 if wanted.mig_profile else wanted.gpus
        taking = fleet.taking(unit, wanted.instance_type, now)
        found = first(taking[bisect_left(taking, whole, key=_FREE_GPUS) :], wanted)
        if isinstance(found, Placement):
            return found
    return choose(load.views(unit, now, None if wanted.node_id is None else [wanted.node_id]), wanted)


def place(unit: WriteUnit, wanted: Wanted, now: int) -> Placement | NoPlace:
    """Find a place and lock its node until the unit ends. The caller writes what it places, then `claims.take`.

    On PostgreSQL two who chose the same node meet at its row: the second sees another generation there, and looks
    again at what is left. CrowdedError after ATTEMPTS times.
    """
    for _ in range(ATTEMPTS):
        found = look(unit, Fleet(), wanted, now)
        if isinstance(found, NoPlace) or claims.seize(unit, found.node.id, found.node.generation):
            return found
    raise CrowdedError(f"{ATTEMPTS} attempts to claim were overtaken")
