"""Every list is read from indexes, on both databases: no table that grows is read whole or sorted for one page."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event

from marketplace.store.prepared import on_driver
from marketplace.store.schema import metadata

if TYPE_CHECKING:
    from tests.marketplace.office import Caller, Office

LISTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "account": ("account.info", {}, "user"),
    "transactions": ("account.transactions_list", {}, "user"),
    "transactions of a range": ("account.transactions_list_v2", {"to": "2099-01-01T00:00:00Z"}, "user"),
    "people": ("users.list", {}, "admin"),
    "people with accounts": ("users.list", {"with_account_info": True}, "admin"),
    "spenders": ("users.list", {"selector": {"ByMinSpend": 1}}, "admin"),
    "search": ("users.search", {"query": "ada"}, "admin"),
    "teams": ("teams.list", {"with_members": True, "with_account_info": True}, "user"),
    "keys": ("keys.list", {}, "user"),
    "events": ("events.list", {}, "user"),
    "everybody's events": ("events.list", {"selector": "All"}, "admin"),
}
CURSOR = "WzE4MDAwMDAwMDAwMDAwMDAsInQiXQ"
"""A time and a text; transactions have a number there."""


def asked(office: Office, name: str, body: dict[str, Any], who: Caller) -> list[tuple[str, Any]]:
    """The queries, with their values, that an operation makes."""
    seen: list[tuple[str, Any]] = []

    def note(connection: Any, cursor: Any, statement: str, values: Any, context: Any, many: bool) -> None:
        if statement.startswith("SELECT"):
            seen.append((statement, values))

    event.listen(office.database._reader, "before_cursor_execute", note)
    try:
        answer = office.ask(name, body, who)
    finally:
        event.remove(office.database._reader, "before_cursor_execute", note)
    assert answer.status == 200, answer.body
    return seen


def plan(office: Office, statement: str, values: Any) -> str:
    """How the database runs a query; on PostgreSQL as in tables that are large."""
    with office.database._writer.begin() as connection:
        if office.database.dialect == "sqlite":
            rows = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", values)
            return "\n".join(str(row[3]) for row in rows)
        for dear in ("seqscan", "bitmapscan", "sort"):
            connection.exec_driver_sql(f"SET LOCAL enable_{dear} = off")
        named = isinstance(values, dict)  # as SQLAlchemy gives them to the driver, and we do not
        run = connection.exec_driver_sql if named else partial(on_driver, connection)
        return "\n".join(row[0] for row in run(f"EXPLAIN {statement}", values))


@pytest.mark.parametrize("name", LISTS)
def test_a_list_is_read_from_indexes(office: Office, name: str) -> None:
    operation, body, role = LISTS[name]
    who = office.person("admin" if role == "admin" else "user", balance=10**9)
    office.team(who)
    office.ask(operation, body, who)  # the settings are read, which have no index and need none
    bodies = [body]
    if operation.endswith("list") and not operation.startswith("account"):
        bodies.append({**body, "cursor": CURSOR})
    told = [plan(office, *query) for asking in bodies for query in asked(office, operation, asking, who)]
    assert told
    for text in told:
        if office.database.dialect == "postgresql":
            assert "Seq Scan" not in text, text
        else:
            scans = [line.split()[1] for line in text.splitlines() if line.startswith("SCAN ") and "INDEX" not in line]
            assert not metadata.tables.keys() & set(scans), text
            # Teams are sorted: somebody's own, and the members of those on the page.
            assert name == "teams" or "TEMP B-TREE FOR ORDER BY" not in text, text
