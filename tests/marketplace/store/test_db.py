"""Units of work: what they allow, what they promise, and how writers meet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    LargeBinary,
    MetaData,
    Table,
    Text,
    create_engine,
    event,
    func,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from marketplace.ledger.tables import account, entry
from marketplace.store import epochs, kept
from marketplace.store.db import Database, ReadUnit, StoreError, WriteUnit


def _bump(database: Database, name: str) -> None:
    with database.write() as unit:
        epochs.bump(unit, name)


def _epoch(database: Database, name: str) -> int:
    with database.read() as unit:
        return epochs.current(unit, name)


def test_a_write_unit_commits_at_its_end(database: Database) -> None:
    _bump(database, "x")
    _bump(database, "x")
    assert _epoch(database, "x") == 2


def test_a_write_unit_rolls_back_when_it_raises(database: Database) -> None:
    with pytest.raises(RuntimeError, match="on purpose"), database.write() as unit:
        epochs.bump(unit, "x")
        raise RuntimeError("on purpose")
    assert _epoch(database, "x") == 0


def test_who_waits_for_a_commit_is_told_after_it_and_never_of_what_is_rolled_back(database: Database) -> None:
    seen: list[int] = []
    with database.write() as unit:
        unit.afterwards(lambda: seen.append(_epoch(database, "x")))
        epochs.bump(unit, "x")
        assert seen == []
    assert seen == [1]
    with pytest.raises(RuntimeError, match="on purpose"), database.write() as unit:
        unit.afterwards(lambda: seen.append(2))
        raise RuntimeError("on purpose")
    assert seen == [1]


def test_connections_stay_open_as_long_as_they_stand(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    with database.read() as unit, database.read() as other:
        assert unit._connection is not other._connection, "nobody shares one"
        first = other._connection
    with database.read() as unit:
        first = unit._connection
    with database.read() as unit:
        assert unit._connection is first
    with pytest.raises(RuntimeError, match="on purpose"), database.read() as unit:
        raise RuntimeError("on purpose")
    assert first.closed, "the pool looks what is left of it"
    with database.read() as unit:
        first = unit._connection
    monkeypatch.setattr(kept, "IDLE_S", -1.0)
    monkeypatch.setattr(kept, "stands", lambda *_: False)
    with database.read() as unit:
        assert (unit._connection is first) == (unit.dialect == "sqlite"), "a file is always there"
    assert first.closed == (database.dialect != "sqlite")
    database.close()
    assert unit._connection.closed
    _bump(database, "x")
    assert _epoch(database, "x") == 1, "it may be used again"


def test_a_read_unit_cannot_write(database: Database) -> None:
    assert not hasattr(ReadUnit, "execute") and not hasattr(ReadUnit, "insert_rows")
    statement = insert(epochs.epoch).values(name="x", value=1)
    with database.read() as unit, pytest.raises(StoreError, match="takes a SELECT"):
        unit.select(statement)  # type: ignore[arg-type]
    with database.read() as unit, pytest.raises(StoreError, match="takes a SELECT"):
        list(unit.stream(update(epochs.epoch)))  # type: ignore[arg-type]
    # and the database would refuse it, too
    with pytest.raises(DBAPIError), database.read() as unit:
        unit._connection.execute(statement)
    assert _epoch(database, "x") == 0


def test_a_read_unit_sees_one_moment(database: Database) -> None:
    _bump(database, "x")
    with database.read() as unit:
        assert epochs.current(unit, "x") == 1
        _bump(database, "x")
        assert epochs.current(unit, "x") == 1
    assert _epoch(database, "x") == 2


def test_a_thread_cannot_wait_for_itself(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'a.db'}")
    with database.write(), pytest.raises(StoreError, match="already has a write unit"), database.write():
        pass
    with database.write() as unit:
        assert isinstance(unit, WriteUnit)
    database.close()


def test_writers_do_not_lose_updates(database: Database) -> None:
    def work() -> None:
        for _ in range(10):
            _bump(database, "x")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _epoch(database, "x") == 40


def test_sqlite_settings(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'a.db'}")
    for engine, query_only in ((database._writer, 0), (database._reader, 1)):
        with engine.connect() as connection:
            pragmas = {
                name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
                for name in ("journal_mode", "synchronous", "foreign_keys", "recursive_triggers", "query_only")
            }
            assert pragmas == {
                "journal_mode": "wal",
                "synchronous": 2,
                "foreign_keys": 1,
                "recursive_triggers": 1,
                "query_only": query_only,
            }
            assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 10_000
    database.close()


def test_sqlite_writers_begin_immediately(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    database = Database(url)
    said: list[str] = []
    event.listen(database._writer, "before_cursor_execute", lambda *given: said.append(given[2]))
    other = create_engine(url, connect_args={"timeout": 0})
    with database.write() as unit:
        assert said == ["BEGIN IMMEDIATE"]
        # No statement has run in the unit, and yet nobody else can begin to write.
        with pytest.raises(OperationalError, match="locked"), other.connect() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        assert unit.dialect == "sqlite"
    with other.connect() as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        connection.exec_driver_sql("ROLLBACK")
    other.dispose()
    database.close()


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://localhost/x"])
def test_unusable_addresses(url: str) -> None:
    with pytest.raises(StoreError):
        Database(url)


def test_foreign_keys_hold(database: Database) -> None:
    row = {"tx_id": "t", "seq": 0, "account_id": "a", "amount": 1, "balance_after": 1, "ordinal": 1}
    with pytest.raises(DBAPIError), database.write() as unit:
        unit.insert_rows(entry, [row])
    with database.read() as unit:
        assert unit.select(select(func.count()).select_from(entry)).scalar() == 0


def test_insert_missing_leaves_what_is_there(database: Database) -> None:
    with database.write() as unit:
        unit.insert_missing(epochs.epoch, [{"name": "x", "value": 5}])
        unit.insert_missing(epochs.epoch, [{"name": "x", "value": 9}, {"name": "y", "value": 1}])
        unit.insert_missing(epochs.epoch, [])
    assert (_epoch(database, "x"), _epoch(database, "y")) == (5, 1)


def test_rows_name_the_same_columns_and_the_others_stay_empty(database: Database) -> None:
    table = Table("odd", MetaData(), Column("id", Text), Column("more", BigInteger))
    other = Table("even", MetaData(), Column("id", Text))
    with database._writer.begin() as connection:
        table.create(connection)
        other.create(connection)
    with database.write() as unit, unit.together():
        unit.insert_rows(table, [{"id": "a"}, {"id": "b"}])
        unit.insert_rows(other, [])
        unit.insert_rows(table, [{"more": 1, "id": "c"}, {"id": "d", "more": 2}])
        unit.insert_rows(other, [{"id": "e"}])
    with pytest.raises(ValueError, match="the same columns"), database.write() as unit:
        unit.insert_rows(table, [{"id": "x"}, {"id": "y", "more": 1}])
    with pytest.raises(RuntimeError, match="on purpose"), database.write() as unit, unit.together():
        unit.insert_rows(other, [{"id": "z"}])
        raise RuntimeError("on purpose")
    with database.read() as unit:
        assert sorted(map(tuple, unit.select(select(table)))) == [("a", None), ("b", None), ("c", 1), ("d", 2)]
        assert unit.select(select(other.c.id)).scalars().all() == ["e"]
    with database._writer.begin() as connection:
        table.drop(connection)
        other.drop(connection)


def test_rows_in_bulk(database: Database) -> None:
    rows = [{"name": f"n{number}", "value": number} for number in range(300)]
    with database.write() as unit:
        unit.insert_rows(epochs.epoch, rows)
        unit.insert_rows(epochs.epoch, [])
        unit.update_rows(
            epochs.epoch,
            "name",
            ("value",),
            [{"name": "n7", "value": 70}, {"name": "n8", "value": 80}, {"name": "?", "value": 1}],
        )
        unit.update_rows(epochs.epoch, "name", ("value",), [])
    with database.read() as unit:
        found = {row.name: row.value for row in unit.stream(select(epochs.epoch), size=50)}
    assert found == {row["name"]: row["value"] for row in rows} | {"n7": 70, "n8": 80}


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8),
            st.binary(max_size=8),
            st.integers(-(2**63), 2**63 - 1),
            st.none() | st.integers(-9, 9),
            st.none() | st.sampled_from(["", "NULL", "null", "{}", '"', "\\", "a,b", "\\x00"]),
        ),
        min_size=1,
        max_size=5,
        unique_by=lambda row: row[2],
    )
)
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
def test_rows_in_bulk_come_back_as_they_went(
    database: Database, rows: list[tuple[str, bytes, int, int | None, str | None]]
) -> None:
    table = Table(
        "odd",
        MetaData(),
        Column("id", BigInteger, primary_key=True, autoincrement=False),
        Column("text", Text),
        Column("bytes", LargeBinary),
        Column("number", BigInteger),
        Column("maybe", Text),
        Column("truth", Boolean),
    )
    values = [
        {"id": key, "text": words, "bytes": raw, "number": number, "maybe": maybe, "truth": key % 2 == 0}
        for words, raw, key, number, maybe in rows
    ]
    with database.write() as unit:
        table.create(unit._connection)
        unit.insert_rows(table, values)
        found = [dict(row._mapping) for row in unit.select(select(table).order_by(table.c.id))]
        assert found == sorted(values, key=itemgetter("id"))
        columns = ("text", "bytes", "number", "maybe", "truth")
        turned = [row | {"truth": not row["truth"], "text": str(row["text"])[::-1]} for row in values]
        unit.update_rows(table, "id", columns, turned)
        found = [dict(row._mapping) for row in unit.select(select(table).order_by(table.c.id))]
        assert found == sorted(turned, key=itemgetter("id"))
        table.drop(unit._connection)


def test_a_customer_has_one_account(database: Database) -> None:
    numbers = ("posted", "held", "credit_limit", "entries", "version", "epoch", "created_at")
    row: dict[str, object] = dict.fromkeys(numbers, 0)
    row |= {"kind": "customer", "owner_kind": "user", "owner_id": "u", "unlimited": False}
    with database.write() as unit:
        unit.execute(insert(account).values(id="a", **row))
    with pytest.raises(IntegrityError), database.write() as unit:
        unit.execute(insert(account).values(id="b", **row))
    assert _epoch(database, "x") == 0


def test_a_deadlock_is_tried_again(database: Database) -> None:
    """Two writers that lock two rows in opposite order: PostgreSQL breaks it, SQLite never lets it begin."""
    _bump(database, "x")
    _bump(database, "y")
    tries: list[str] = []
    both_hold_one, one_is_done = threading.Barrier(2), threading.Event()

    def work(first: str, second: str) -> Callable[[], None]:
        def cross(unit: WriteUnit) -> None:
            tries.append(first)
            if tries.count(first) == 2:  # who is tried again would meet the other once more
                assert one_is_done.wait(30)
            epochs.bump(unit, first)
            if tries.count(first) == 1 and database.dialect == "postgresql":
                both_hold_one.wait(timeout=30)
            epochs.bump(unit, second)

        def run() -> None:
            database.transact(cross)
            one_is_done.set()

        return run

    threads = [threading.Thread(target=work("x", "y")), threading.Thread(target=work("y", "x"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (_epoch(database, "x"), _epoch(database, "y")) == (3, 3)
    assert len(tries) == (3 if database.dialect == "postgresql" else 2)


def test_other_errors_are_not_tried_again(database: Database) -> None:
    tries: list[int] = []

    def work(unit: WriteUnit) -> None:
        tries.append(1)
        unit.execute(insert(epochs.epoch).values(name=None, value=1))

    with pytest.raises(IntegrityError):
        database.transact(work)
    assert len(tries) == 1


def test_a_closed_database_may_be_used_again(database: Database) -> None:
    _bump(database, "x")
    database.close()
    assert _epoch(database, "x") == 1
    with database.read() as unit:
        assert unit.select(select(text("1"))).scalar() == 1
