"""What belongs to any of several things, from several tables. Few things are asked about one by one, in statements that
each database has a plan for, and together; many are asked about in one statement for each table."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Select, bindparam

from marketplace.store.db import ReadUnit
from marketplace.store.prepared import Prepared

FEW = 4


class Part:
    """Rows of a SELECT, of those things that `key` names."""

    def __init__(self, wanted: Select[*tuple[Any, ...]], key: ColumnElement[str]) -> None:
        self.of_one = Prepared(wanted.where(key == bindparam("key")))
        self.of_many = wanted.where(key.in_(bindparam("keys", expanding=True)))


def gather(unit: ReadUnit, parts: Sequence[Part], keys: Collection[str], **values: Any) -> list[list[Any]]:
    """Return the rows of each part that belong to any of the keys; `values` are for parameters beside them."""
    if len(keys) > FEW:
        return [list(unit.select(part.of_many, {"keys": list(keys), **values}).all()) for part in parts]
    found = iter(unit.several([(part.of_one, {"key": key, **values}) for part in parts for key in keys]))
    return [[row for _ in keys for row in next(found)] for _ in parts]
