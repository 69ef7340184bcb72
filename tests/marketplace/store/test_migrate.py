"""Migrations make exactly the schema that the code declares, on both databases, and the database guards history."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, Index, create_engine, func, insert, inspect, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import SchemaItem

from marketplace.keys import service as keys
from marketplace.ledger.tables import APPEND_ONLY
from marketplace.placement.tables import gpu_slice_claim
from marketplace.store import migrate
from marketplace.store.db import Database
from marketplace.store.schema import metadata
from marketplace.users import service as users
from tests.marketplace.office import Office
from tests.marketplace.rack import Rack

if TYPE_CHECKING:
    from tests.marketplace.conftest import MakeDatabase, Shop


HEAD = max(path.name for path in (Path(migrate.__file__).parent / "migrations" / "versions").glob("0*.py"))[:4]


def test_the_migrated_schema_is_the_declared_one(database: Database) -> None:
    def meant(thing: SchemaItem, *_: object) -> bool:
        """Alembic does not know that an index may be for one kind of database."""
        return not isinstance(thing, Index) or thing.name != "ix_node_taking" or database.dialect == "sqlite"

    options = {"compare_type": True, "target_metadata": metadata, "include_object": meant}
    with database._writer.connect() as connection:
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, metadata) == []


def test_checks_and_partial_indexes_are_the_declared_ones(make_database: MakeDatabase) -> None:
    """Alembic compares neither: the same tables are made from the metadata in a second database and both are read
    back."""
    migrated, declared = make_database(), make_database()
    with declared._writer.begin() as connection:
        metadata.drop_all(connection)
        metadata.create_all(connection)
    read_back = []
    for database in (migrated, declared):
        inspector = inspect(database._writer)
        read_back.append(
            {
                name: (
                    sorted((check["name"], check["sqltext"]) for check in inspector.get_check_constraints(name)),
                    sorted(
                        (
                            index["name"],
                            index["unique"],
                            sorted((k, str(v)) for k, v in index.get("dialect_options", {}).items()),
                        )
                        for index in inspector.get_indexes(name)
                    ),
                )
                for name in metadata.tables
            }
        )
    assert read_back[0] == read_back[1]
    assert read_back[0]["account"][0] and read_back[0]["hold"][1]


def test_migrating_again_changes_nothing(database: Database) -> None:
    assert database.migrate() == database.migrate() == HEAD


def test_two_processes_may_migrate_at_once(make_database: MakeDatabase) -> None:
    empty = make_database()
    engine = create_engine(empty.url)
    with engine.begin() as connection:
        metadata.drop_all(connection)
        connection.execute(text("DROP TABLE alembic_version"))
        if empty.dialect == "postgresql":
            connection.execute(text("DROP FUNCTION refuse_change"))
            connection.execute(text("DROP FUNCTION refuse_imbalance"))
    engine.dispose()
    versions: list[str] = []

    def start() -> None:
        database = Database(empty.url)
        versions.append(database.migrate())
        database.close()

    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert versions == [HEAD] * 3


def test_a_database_of_somebody_else_is_left_alone(make_database: MakeDatabase) -> None:
    foreign = make_database()
    engine = create_engine(foreign.url)
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE alembic_version"))
    with pytest.raises(AssertionError, match="in the way"):
        foreign.migrate()
    engine.dispose()
    with foreign.read() as unit:
        assert unit.dialect == foreign.dialect


@pytest.mark.parametrize("table", APPEND_ONLY)
@pytest.mark.parametrize("change", ["UPDATE {0} SET {1} = {1}", "DELETE FROM {0}"])
def test_history_is_final(shop: Shop, table: str, change: str) -> None:
    customer = shop.customer(balance=10**9)
    hold = shop.hold(customer, 10**6)
    shop.apply(hold, shop.settle(hold.request_id, 10, 0, 10))
    column = next(iter(metadata.tables[table].columns)).name
    before = shop.dump()
    with pytest.raises(DBAPIError, match=f"{table} is append-only"), shop.database._writer.begin() as connection:
        connection.execute(text(change.format(table, column)))
    assert shop.dump() == before
    assert before[table]


def test_history_cannot_be_truncated_or_replaced(shop: Shop) -> None:
    if shop.database.dialect != "sqlite":
        with pytest.raises(DBAPIError, match="append-only"), shop.database._writer.begin() as connection:
            connection.execute(text("TRUNCATE price_version CASCADE"))
    else:
        with pytest.raises(DBAPIError, match="append-only"), shop.database._writer.begin() as connection:
            connection.execute(text("INSERT OR REPLACE INTO price_version SELECT * FROM price_version"))
    assert len(shop.dump()["price_version"]) == 1


def test_postgresql_refuses_entries_that_do_not_balance(shop: Shop) -> None:
    customer = shop.customer(balance=10**9)
    statement = text(
        "INSERT INTO entry (tx_id, seq, account_id, amount, balance_after, ordinal) "
        "SELECT id, 9, :account, 5, 5, 9 FROM ledger_tx"
    )
    if shop.database.dialect == "postgresql":
        with pytest.raises(DBAPIError, match="do not sum to zero"), shop.database._writer.begin() as connection:
            connection.execute(statement, {"account": customer})
        assert shop.audit().clean
    else:
        # SQLite cannot express it; there the audit is what finds it.
        with shop.database._writer.begin() as connection:
            connection.execute(statement, {"account": customer})
        assert "I1" in shop.audit().failed


def go_back(connection: Connection, revision: str) -> None:
    """Make the empty schema of a revision."""
    metadata.drop_all(connection)
    connection.execute(text("DROP TABLE alembic_version"))
    if connection.dialect.name == "postgresql":
        connection.execute(text("DROP FUNCTION refuse_change"))
        connection.execute(text("DROP FUNCTION refuse_imbalance"))
    config = Config()
    config.set_main_option("script_location", str(Path(migrate.__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


def test_claims_of_before_they_were_kept_by_owner_live_on(tmp_path: Path) -> None:
    """SQLite moves them into other tables; PostgreSQL leaves them where they are."""
    now, old = (Database(f"sqlite:///{tmp_path / name}.db") for name in ("now", "old"))
    now.migrate()
    old.migrate()
    office = Office(now)
    rack, ada = Rack(office), office.person(balance=1000 * 10**9)
    rack.node()
    ended = rack.rented(ada)
    rack.rented(ada)
    rack.terminate(ada, ended)
    with office.database.read() as unit, old._writer.begin() as connection:
        go_back(connection, "0012")
        for table in metadata.sorted_tables:
            rows = [row._asdict() for row in unit.select(select(table))]
            if rows:
                connection.execute(insert(table), rows)
    assert old.migrate() == HEAD
    with office.database.read() as unit, old.read() as other:
        for table in metadata.sorted_tables:
            there, here = (sorted(map(repr, one.select(select(table)).all())) for one in (unit, other))
            assert there == here, table.name
        claimed = select(func.count()).select_from(gpu_slice_claim).where(gpu_slice_claim.c.released_at.is_(None))
        assert other.select(claimed).scalar_one() == 16
    now.close()
    old.close()


def test_keys_and_people_of_before_the_management_api_live_on(make_database: MakeDatabase) -> None:
    database = make_database()
    with database._writer.begin() as connection:
        go_back(connection, "0001")
        for statement in (
            "INSERT INTO account VALUES ('a', 'customer', 'user', 'u', 0, 0, 0, FALSE, 0, 1, 0, 5)",
            "INSERT INTO users VALUES ('u', 'A@x', 'a@x', 'A', 'user', NULL, 'a', 5)",
            "INSERT INTO api_key (id, kind, owner_id, account_id, name, prefix, digest, created_at) "
            "VALUES ('k', 'user', 'u', 'a', 'n', 'p', 'd', 5)",
        ):
            connection.execute(text(statement))
    assert database.migrate() == HEAD
    with database.read() as unit:
        assert [(row.id, row.active) for row in keys.load_active(unit)] == [("k", True)]
        user = users.find(unit, "u")
    assert user is not None and (user.email, user.last_login_at) == ("A@x", None)
