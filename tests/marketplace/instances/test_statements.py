"""What a rental asks of its database is bounded: each statement is a part of somebody's waiting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sqlalchemy import event

from tests.marketplace.rack import Rack

if TYPE_CHECKING:
    from marketplace.store.db import Database
    from tests.marketplace.conftest import Caller, Office

READS = 6
"""who asks, whether the settings are still these (once a second), what they may spend and what is on offer, tags of the
image, nodes that changed, ports in use"""
WRITES = 3
"""whether they are still there, and what they may spend; the node's generation"""
TABLES = 6
"""that a virtual machine with GPUs has rows in; PostgreSQL takes all of them in one statement"""


@contextmanager
def statements(database: Database) -> Iterator[list[str]]:
    """Those of the block, but for beginnings of transactions."""
    seen: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if not statement.startswith("BEGIN"):
            seen.append(statement)

    # PostgreSQL's readers share the events of its writers.
    engines = [database._writer] if database.dialect == "postgresql" else [database._writer, database._reader]
    for engine in engines:
        event.listen(engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        for engine in engines:
            event.remove(engine, "before_cursor_execute", note)


def test_a_rental_takes_few_statements_however_many_nodes_there_are(rack: Rack, ada: Caller, office: Office) -> None:
    for number in range(5):
        rack.node(f"g0{number}", gpus=4)
    rack.rented(ada)  # what a process reads once is not counted
    inserts = 1 if office.database.dialect == "postgresql" else TABLES
    for _ in range(4):
        with statements(office.database) as seen:
            rack.rented(ada)
        assert len(seen) == READS + WRITES + inserts, "\n".join(seen)
        assert sum(one.startswith("SELECT") for one in seen) == READS + WRITES - 1


def test_somebody_elses_change_of_a_node_is_read_in_few_statements(rack: Rack, ada: Caller, office: Office) -> None:
    agent = rack.node(gpus=4)
    taken = rack.rented(ada)
    rack.terminate(ada, taken)
    agent.clean()
    inserts = 1 if office.database.dialect == "postgresql" else TABLES
    with statements(office.database) as seen:
        rack.rented(ada)
    of_a_node = 5
    assert len(seen) == READS + of_a_node + WRITES + inserts, "\n".join(seen)
