"""Many rows in one statement: what a batch of settlements writes, at the driver's speed.

SQLAlchemy's executemany costs about 10 µs a row to prepare parameters, and PostgreSQL answers every row of it. Here
SQLite's driver takes plain tuples, and PostgreSQL takes one array for each column. Names come from the tables' own
metadata and values are always bound parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Connection, LargeBinary, Table, Text

from marketplace.store.prepared import on_driver

_ARRAYS: dict[type[Any], str] = {
    BigInteger: "bigint[]",
    Text: "text[]",
    Boolean: "boolean[]",
    LargeBinary: "bytea[]",
}


Rows = Sequence[Mapping[str, Any]]


def insert_rows(connection: Connection, parts: Sequence[tuple[Table, Rows]]) -> None:
    """Insert rows of any tables. The rows of a table have values for the same columns; the others stay empty.
    ValueError where they are not the same."""
    parts = [(table, rows) for table, rows in parts if rows]
    if any(len(row) != len(rows[0]) for _, rows in parts for row in rows):
        raise ValueError("rows of one table have values for the same columns")
    places = tuple((table, tuple(rows[0])) for table, rows in parts)
    if connection.dialect.name == "sqlite":
        for (table, names), (_, rows) in zip(places, parts, strict=True):
            on_driver(connection, _insert_one(table, names), _tuples(names, rows), many=True)
    elif parts:
        arrays = [
            _array_literal([row[name] for row in rows])
            for (_, names), (_, rows) in zip(places, parts, strict=True)
            for name in names
        ]
        on_driver(connection, _insert_arrays(places), arrays)


def update_rows(connection: Connection, table: Table, key: str, columns: tuple[str, ...], rows: Rows) -> None:
    """Set `columns` in the rows whose `key` equals that of a given row; each given row has the key and those
    columns."""
    if not rows:
        return
    order = (*columns, key)
    if connection.dialect.name == "sqlite":
        on_driver(connection, _update_one(table, key, columns), _tuples(order, rows), many=True)
    else:
        arrays = [_array_literal([row[name] for row in rows]) for name in order]
        on_driver(connection, _update_arrays(table, key, columns), arrays)


def _tuples(names: tuple[str, ...], rows: Rows) -> list[tuple[Any, ...]]:
    values = map(itemgetter(*names), rows)
    return [(value,) for value in values] if len(names) == 1 else list(values)


def _array_literal(values: Sequence[Any]) -> str:
    """Return PostgreSQL's text form of an array, to be bound as one parameter: psycopg's own takes ten times as
    long."""
    return "{" + ",".join([_element(value) for value in values]) + "}"


def _element(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, bytes):
        return f'"\\\\x{value.hex()}"'
    return "NULL" if value is None else str(value)


@lru_cache(maxsize=64)
def _insert_one(table: Table, names: tuple[str, ...]) -> str:
    return f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"  # noqa: S608


@lru_cache(maxsize=64)
def _insert_arrays(places: tuple[tuple[Table, tuple[str, ...]], ...]) -> str:
    """One statement for several tables. References between their rows are looked at when all of them are there."""
    begin, inserts = 1, []
    for table, names in places:
        arrays = _arrays(table, names, begin)
        inserts.append(f"INSERT INTO {table.name} ({', '.join(names)}) SELECT * FROM unnest({arrays})")  # noqa: S608
        begin += len(names)
    first = ", ".join(f"part{number} AS ({insert})" for number, insert in enumerate(inserts[:-1]))
    return f"WITH {first} {inserts[-1]}" if first else inserts[-1]


@lru_cache(maxsize=64)
def _update_one(table: Table, key: str, columns: tuple[str, ...]) -> str:
    changes = ", ".join(f"{name} = ?" for name in columns)
    return f"UPDATE {table.name} SET {changes} WHERE {key} = ?"  # noqa: S608


@lru_cache(maxsize=64)
def _update_arrays(table: Table, key: str, columns: tuple[str, ...]) -> str:
    order = (*columns, key)
    changes = ", ".join(f"{name} = fresh.{name}" for name in columns)
    fresh = f"unnest({_arrays(table, order, 1)}) AS fresh({', '.join(order)})"
    condition = f"{table.name}.{key} = fresh.{key}"
    return f"UPDATE {table.name} SET {changes} FROM {fresh} WHERE {condition}"  # noqa: S608


def _arrays(table: Table, names: Sequence[str], begin: int) -> str:
    return ", ".join(f"${at}::{_array(table.c[name])}" for at, name in enumerate(names, begin))


def _array(column: Column[Any]) -> str:
    return _ARRAYS[type(column.type)]
