"""Read and change the settings. Every change raises their epoch in the same transaction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from sqlalchemy import delete, insert, select

from marketplace.settings.rules import AppSettings, check, read
from marketplace.settings.tables import app_setting
from marketplace.store import epochs
from marketplace.store.db import ReadUnit, WriteUnit


class Change(msgspec.Struct, frozen=True):
    """One setting that was changed: its value before and after, in the units of AppSettings."""

    name: str
    old: Any
    new: Any


def current(unit: ReadUnit) -> AppSettings:
    """Return the settings as they are in this snapshot."""
    rows = unit.select(select(app_setting.c.name, app_setting.c.value))
    return read({row.name: row.value for row in rows})


def epoch(unit: ReadUnit) -> int:
    """Return the number that rises whenever a setting is changed."""
    return epochs.current(unit, epochs.SETTINGS)


def announce(unit: WriteUnit) -> None:
    """Raise the epoch: whoever keeps a copy reads again. Others who change settings wait until this unit ends."""
    epochs.bump(unit, epochs.SETTINGS)


def change(unit: WriteUnit, values: Mapping[str, Any], now: int) -> tuple[AppSettings, list[Change]]:
    """Set some of the settings; return them all, and what is different now. SettingError when they would contradict
    each other. The values are those that the fields of AppSettings allow."""
    announce(unit)
    before = current(unit)
    after = check(msgspec.structs.replace(before, **values))
    changes = [
        Change(name, getattr(before, name), getattr(after, name))
        for name in sorted(values)
        if getattr(before, name) != getattr(after, name)
    ]
    for item in changes:
        unit.execute(delete(app_setting).where(app_setting.c.name == item.name))
        value = msgspec.json.encode(item.new).decode()
        unit.execute(insert(app_setting).values(name=item.name, value=value, updated_at=now))
    return after, changes
