"""Epochs: one integer per subject that rises with every change, so that readers of a copy in memory poll one row."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Table, Text, select, update

from marketplace.store.base import metadata
from marketplace.store.db import ReadUnit, WriteUnit

epoch = Table(
    "epoch",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", BigInteger, nullable=False),
)

KEYS = "keys"
ACCOUNTS = "accounts"
USERS = "users"
PROVIDERS = "providers"
SETTINGS = "settings"
CATALOG = "catalog"


def current(unit: ReadUnit, name: str) -> int:
    """Return the epoch of a subject; 0 before its first change."""
    return int(unit.select(select(epoch.c.value).where(epoch.c.name == name)).scalar() or 0)


def bump(unit: WriteUnit, name: str) -> int:
    """Raise a subject's epoch by one and return it. The row stays locked until the unit ends, so epochs appear in
    order."""
    unit.insert_missing(epoch, [{"name": name, "value": 0}])
    unit.execute(update(epoch).where(epoch.c.name == name).values(value=epoch.c.value + 1))
    return current(unit, name)
