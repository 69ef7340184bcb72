"""What is on offer, as one process read it last: settings, variants, types and datacenters. Whoever changes any of them
raises an epoch; a copy whose epochs are still these is still right."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from marketplace.catalog import datacenters, service
from marketplace.catalog.datacenters import Datacenter
from marketplace.catalog.service import InstanceType, Variant
from marketplace.settings import service as settings
from marketplace.settings.rules import AppSettings
from marketplace.store import epochs
from marketplace.store.db import ReadUnit, WriteUnit

EPOCHS = (epochs.SETTINGS, epochs.CATALOG, epochs.PROVIDERS)
Stamp = tuple[int, ...]
"""The epochs of EPOCHS."""


class Board(msgspec.Struct, frozen=True, kw_only=True):
    """All that is on offer at a stamp."""

    stamp: Stamp
    settings: AppSettings
    variants: Mapping[str, Variant]
    types: Mapping[str, InstanceType]
    datacenters: Mapping[str, Datacenter]
    """by id"""


class BoardCache:
    """A copy of the board of one database. Safe to share between threads."""

    def __init__(self) -> None:
        self._board: Board | None = None

    def at(self, unit: ReadUnit, stamp: Stamp) -> Board:
        """The board at a stamp that was read in the same unit."""
        known = self._board
        if known is not None and known.stamp == stamp:
            return known
        found = Board(
            stamp=stamp,
            settings=settings.current(unit),
            variants={one.name: one for one in service.variants(unit)},
            types=service.types(unit),
            datacenters=datacenters.every(unit),
        )
        if not isinstance(unit, WriteUnit):  # its statements may see different moments
            self._board = found
        return found
