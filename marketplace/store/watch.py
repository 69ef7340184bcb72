"""A look at the epochs that costs next to nothing: for who keeps a copy in memory and asks several times a second.

A unit of work of the library costs about a millisecond of the interpreter, which everything else in the process has to
wait for; one statement on a connection that stays open costs a twentieth of it.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import PoolProxiedConnection
from sqlalchemy.exc import SQLAlchemyError

from marketplace.store.db import Database

_SELECT = "SELECT value FROM epoch WHERE name = "


class WatchError(SQLAlchemyError):
    """The database does not answer. The next look tries on a new connection."""


class Watch:
    """Looks at one epoch. For one thread at a time."""

    def __init__(self, database: Database, name: str) -> None:
        """`name` is the subject, as in store.epochs."""
        self._database = database
        self._name = name
        self._held: PoolProxiedConnection | None = None
        self._cursor: Any = None

    def value(self) -> int:
        """The epoch as it is now; 0 before its first change. Raises WatchError."""
        try:
            if self._cursor is None:
                self._open()
            self._cursor.execute(self._statement, (self._name,))
            rows = self._cursor.fetchall()  # to the end: a statement in the middle would keep its snapshot open
        except (SQLAlchemyError, OSError, self._database.driver_error) as error:
            self.close()
            raise WatchError(f"the epoch of {self._name} cannot be read: {error}") from error
        return int(rows[0][0]) if rows else 0

    def close(self) -> None:
        """Let the connection go."""
        held, self._held, self._cursor = self._held, None, None
        if held is not None:
            held.invalidate()

    @property
    def _statement(self) -> str:
        return _SELECT + ("?" if self._database.dialect == "sqlite" else "%s")

    def _open(self) -> None:
        held = self._held = self._database.connection()
        if self._database.dialect != "sqlite":
            held.driver_connection.autocommit = True  # type: ignore[union-attr] # psycopg's; each look is its own
        self._cursor = held.cursor()
