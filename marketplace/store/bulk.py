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


def insert_rows(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows that give a value for every column of the table."""
    if rows:
        statement, order = _insert(table, connection.dialect.name)
        _run(connection, statement, order, rows)


def update_rows(
    connection: Connection, table: Table, key: str, columns: tuple[str, ...], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Set `columns` in the rows whose `key` equals that of a given row; each given row has the key and those
    columns."""
    if rows:
        statement, order = _update(table, key, columns, connection.dialect.name)
        _run(connection, statement, order, rows)


def _run(connection: Connection, statement: str, order: tuple[str, ...], rows: Sequence[Mapping[str, Any]]) -> None:
    if connection.dialect.name == "sqlite":
        on_driver(connection, statement, list(map(itemgetter(*order), rows)), many=True)
    else:
        on_driver(connection, statement, tuple(_array_literal([row[name] for row in rows]) for name in order))


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
def _insert(table: Table, dialect: str) -> tuple[str, tuple[str, ...]]:
    names = tuple(column.name for column in table.columns)
    if dialect == "sqlite":
        source = f"VALUES ({', '.join('?' * len(names))})"
    else:
        source = f"SELECT * FROM unnest({_arrays(table, names)})"  # noqa: S608
    return f"INSERT INTO {table.name} ({', '.join(names)}) {source}", names


@lru_cache(maxsize=64)
def _update(table: Table, key: str, columns: tuple[str, ...], dialect: str) -> tuple[str, tuple[str, ...]]:
    order = (*columns, key)
    if dialect == "sqlite":
        changes = ", ".join(f"{name} = ?" for name in columns)
        return f"UPDATE {table.name} SET {changes} WHERE {key} = ?", order  # noqa: S608
    changes = ", ".join(f"{name} = fresh.{name}" for name in columns)
    fresh = f"unnest({_arrays(table, order)}) AS fresh({', '.join(order)})"
    condition = f"{table.name}.{key} = fresh.{key}"
    return f"UPDATE {table.name} SET {changes} FROM {fresh} WHERE {condition}", order  # noqa: S608


def _arrays(table: Table, names: Sequence[str]) -> str:
    return ", ".join(f"%s::{_array(table.c[name])}" for name in names)


def _array(column: Column[Any]) -> str:
    return _ARRAYS[type(column.type)]
