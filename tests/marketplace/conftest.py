"""Every test of this room that touches a database runs on SQLite and on a real PostgreSQL."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text

from marketplace.store.db import Database
from marketplace.store.schema import metadata
from tests.marketplace.office import Office, Post
from tests.marketplace.shop import Shop
from tests.marketplace.yard import Yard

MakeDatabase = Callable[[], Database]


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated, empty SQLite file: copying it is a hundred times faster than migrating."""
    path = tmp_path_factory.mktemp("template") / "empty.db"
    database = Database(f"sqlite:///{path}")
    database.migrate()
    database.close()
    return path


@pytest.fixture(scope="session")
def postgres_template(postgres_url: str) -> str:
    """Name of a migrated, empty PostgreSQL database."""
    admin = create_engine(postgres_url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text("CREATE DATABASE marketplace_empty"))
    admin.dispose()
    database = Database(make_url(postgres_url).set(database="marketplace_empty").render_as_string(hide_password=False))
    database.migrate()
    database.close()
    return "marketplace_empty"


@pytest.fixture(params=["sqlite", "postgresql"])
def make_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeDatabase]:
    """Makes migrated, empty databases of one kind; all are closed and removed at the end of the test."""
    made: list[Database] = []
    numbers = itertools.count(1)
    names: list[str] = []
    if request.param == "sqlite":
        template: Path = request.getfixturevalue("sqlite_template")

        def make() -> Database:
            path = tmp_path / f"{next(numbers)}.db"
            shutil.copyfile(template, path)
            made.append(Database(f"sqlite:///{path}"))
            return made[-1]

        yield make
        for database in made:
            database.close()
        return

    url: str = request.getfixturevalue("postgres_url")
    source: str = request.getfixturevalue("postgres_template")
    admin = create_engine(url, isolation_level="AUTOCOMMIT")

    def make_postgres() -> Database:
        name = f"marketplace_{abs(hash(request.node.nodeid))}_{next(numbers)}"
        with admin.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {source}"))
        names.append(name)
        made.append(Database(make_url(url).set(database=name).render_as_string(hide_password=False)))
        return made[-1]

    yield make_postgres
    for database in made:
        database.close()
    with admin.connect() as connection:
        for name in names:
            connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


@pytest.fixture(scope="session")
def postgres_shared(postgres_url: str, postgres_template: str) -> Iterator[Database]:
    """One PostgreSQL database for all tests that leave its schema alone; it is emptied before each."""
    admin = create_engine(postgres_url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE marketplace_shared TEMPLATE {postgres_template}"))
    admin.dispose()
    url = make_url(postgres_url).set(database="marketplace_shared").render_as_string(hide_password=False)
    database = Database(url)
    yield database
    database.close()


def _empty(database: Database) -> None:
    with database._writer.begin() as connection:
        # Nothing else may empty append-only tables: this switches triggers off for the one transaction.
        connection.execute(text("SET LOCAL session_replication_role = replica"))
        for table in metadata.sorted_tables:
            connection.execute(table.delete())
        # A test that did damage could only put its CHECK constraints back unvalidated.
        unsure = text("SELECT conrelid::regclass, conname FROM pg_constraint WHERE NOT convalidated")
        for table_name, name in connection.execute(unsure).all():
            connection.execute(text(f"ALTER TABLE {table_name} VALIDATE CONSTRAINT {name}"))


@pytest.fixture(params=["sqlite", "postgresql"])
def fresh_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeDatabase]:
    """Gives a migrated, empty database each time, quickly: hundreds in one test. Only the latest may be used."""
    made: list[Database] = []

    def fresh() -> Database:
        if request.param == "postgresql":
            shared: Database = request.getfixturevalue("postgres_shared")
            _empty(shared)
            return shared
        if made:
            made.pop().close()
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.db"
        shutil.copyfile(request.getfixturevalue("sqlite_template"), path)
        made.append(Database(f"sqlite:///{path}"))
        return made[0]

    yield fresh
    for database in made:
        database.close()


@pytest.fixture
def database(fresh_database: MakeDatabase) -> Database:
    """One migrated, empty database, whose schema the test leaves as it is."""
    return fresh_database()


@pytest.fixture
def make_shop() -> Callable[[Database], Shop]:
    """The class Shop, for tests that open several."""
    return Shop


@pytest.fixture
def shop(database: Database) -> Shop:
    """A shop in an empty database."""
    return Shop(database)


@pytest.fixture
def office(database: Database) -> Office:
    """The management API on an empty database."""
    return Office(database)


@pytest.fixture
def yard(office: Office) -> Yard:
    """Nodes of a provider in the office."""
    return Yard(office)


@pytest.fixture
def post(office: Office) -> Post:
    """The office's mail."""
    return Post(office)


@pytest.fixture(scope="module")
def sqlite_office(sqlite_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    """One management API for all tests of a module that leave nothing behind that others would see."""
    path = tmp_path_factory.mktemp("office") / "office.db"
    shutil.copyfile(sqlite_template, path)
    database = Database(f"sqlite:///{path}")
    yield Office(database)
    database.close()
