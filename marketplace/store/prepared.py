"""Statements for the few paths that are asked for often, and in somebody's waiting: written like all others, turned
into the text of each kind of database once, and run on the driver's own cursor.

SQLAlchemy spends about 0.1 ms of the interpreter on every statement that it runs, most of it on what these do without:
looking the statement up among the compiled ones, and describing the columns of its result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Boolean, Connection, Delete, Insert, Select, Update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.compiler import SQLCompiler

Values = Mapping[str, Any]
_CURSOR = "headrace_cursor"


def on_driver(connection: Connection, text: str, given: Any = (), *, many: bool = False, apart: bool = False) -> Any:
    """Run a statement on the driver's own cursor and return that, with `many` once for each of several parameters. The
    next statement takes the same cursor, unless this one is to be kept `apart`. PostgreSQL's parameters are $1, $2, …
    Who listens for `before_cursor_execute` hears of it. Raises what SQLAlchemy would."""
    try:
        cursor = _new_cursor(connection) if apart else _cursor(connection)
        for listener in connection.dispatch.before_cursor_execute:
            listener(connection, cursor, text, given, None, many)
        if many:
            cursor.executemany(text, given)
        else:
            cursor.execute(text, given)
    except connection.dialect.loaded_dbapi.Error as error:
        raise _raised(connection, error, text) from error
    return cursor


def _cursor(connection: Connection) -> Any:
    """The cursor that stays with a connection: making one for each statement takes PostgreSQL's driver as long as
    running it."""
    info = connection.info
    cursor = info.get(_CURSOR)
    if cursor is None:
        cursor = info[_CURSOR] = _new_cursor(connection)
    return cursor


def _new_cursor(connection: Connection) -> Any:
    driver: Any = connection.connection.driver_connection
    dbapi: Any = connection.dialect.loaded_dbapi
    return dbapi.RawCursor(driver) if connection.dialect.name == "postgresql" else driver.cursor()


@contextmanager
def together(connection: Connection) -> Iterator[None]:
    """Send the statements of the block to PostgreSQL at once, instead of waiting for the answer of each: for statements
    that need nothing of one another's answers. What one of them raises, the block raises at its end."""
    if connection.dialect.name != "postgresql":
        yield
        return
    driver: Any = connection.connection.driver_connection
    try:
        with driver.pipeline():
            yield
    except connection.dialect.loaded_dbapi.Error as error:
        raise _raised(connection, error, None) from error


def several(connection: Connection, asked: Sequence[tuple[Prepared, Values]]) -> list[list[tuple[Any, ...]]]:
    """Run SELECTs together and return the rows of each. Raises what SQLAlchemy would."""
    with together(connection):
        cursors = [prepared.run(connection, values, apart=True) for prepared, values in asked]
        return [prepared.read(connection, cursor) for (prepared, _), cursor in zip(asked, cursors, strict=True)]


def _raised(connection: Connection, error: Exception, text: str | None) -> BaseException:
    """An error of the driver as SQLAlchemy raises it. Parameters are not told: they may be secret."""
    driver: Any = connection.dialect.loaded_dbapi
    return DBAPIError.instance(text, None, error, driver.Error, hide_parameters=True, dialect=connection.dialect)


class Prepared:
    """A statement whose parameters have names. It has no lists of values: their number would be part of its text."""

    def __init__(self, statement: Select[*tuple[Any, ...]] | Insert | Update | Delete) -> None:
        """`statement` is compiled when it is run first, once for each kind of database."""
        self.statement = statement
        self._forms: dict[str, _Form] = {}

    def rows(self, connection: Connection, values: Values) -> list[tuple[Any, ...]]:
        """Run a SELECT and return its rows. Raises what SQLAlchemy would."""
        return self.read(connection, self.run(connection, values))

    def change(self, connection: Connection, values: Values) -> int:
        """Run anything else and return how many rows it changed. Raises what SQLAlchemy would."""
        changed: int = self.run(connection, values).rowcount
        return changed

    def run(self, connection: Connection, values: Values, *, apart: bool = False) -> Any:
        """Run it, as `on_driver` does, and return its cursor."""
        form = self._form(connection)
        return on_driver(connection, form.text, form.given(values), apart=apart)

    def read(self, connection: Connection, cursor: Any) -> list[tuple[Any, ...]]:
        """Return the rows that a SELECT found."""
        truths = self._form(connection).truths
        found: list[tuple[Any, ...]] = cursor.fetchall()
        return [_with_truths(row, truths) for row in found] if truths else found

    def _form(self, connection: Connection) -> _Form:
        name = connection.dialect.name
        form = self._forms.get(name)
        if form is None:
            form = self._forms[name] = _Form(self, connection)
        return form


class _Form:
    """A statement in the words of one kind of database."""

    def __init__(self, prepared: Prepared, connection: Connection) -> None:
        dialect: Any = connection.dialect
        if dialect.name == "postgresql":
            dialect = type(dialect)(paramstyle="numeric_dollar")
        compiled = prepared.statement.compile(dialect=dialect)
        assert isinstance(compiled, SQLCompiler), "a statement is compiled as such"
        self.text = str(compiled)
        self._given = dict(compiled.params)
        self._order = compiled.positiontup
        lacks_truth = dialect.name == "sqlite"  # it returns 0 and 1
        columns = prepared.statement.selected_columns if isinstance(prepared.statement, Select) else ()
        self.truths = [
            place for place, column in enumerate(columns) if lacks_truth and isinstance(column.type, Boolean)
        ]

    def given(self, values: Values) -> Any:
        """The parameters as the driver takes them."""
        named = {**self._given, **values}
        return named if self._order is None else tuple([named[name] for name in self._order])


def _with_truths(row: tuple[Any, ...], places: Sequence[int]) -> tuple[Any, ...]:
    """A row with true and false at these places."""
    values = list(row)
    for place in places:
        values[place] = None if values[place] is None else bool(values[place])
    return tuple(values)
