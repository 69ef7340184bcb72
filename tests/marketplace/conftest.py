"""Every test of this room that touches a database runs on SQLite and on a real PostgreSQL."""

from __future__ import annotations

import itertools
import shutil
import tempfile
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
def make_database(request: pytest.FixtureRequest, quick_folder: Path) -> Iterator[MakeDatabase]:
    """Makes migrated, empty databases of one kind; all are closed and removed at the end of the test."""
    made: list[Database] = []
    numbers = itertools.count(1)
    names: list[str] = []
    if request.param == "sqlite":
        template: Path = request.getfixturevalue("sqlite_template")
        folder = Path(tempfile.mkdtemp(dir=quick_folder))

        def make() -> Database:
            path = folder / f"{next(numbers)}.db"
            shutil.copyfile(template, path)
            made.append(Database(f"sqlite:///{path}"))
            return made[-1]

        yield make
        for database in made:
            database.close()
        shutil.rmtree(folder)
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
    # Nothing else may empty append-only tables: this switches triggers off for the one transaction.
    changes = ["SET LOCAL session_replication_role = replica"]
    changes += [f'DELETE FROM "{table.name}"' for table in metadata.sorted_tables]
    with database._writer.begin() as connection:
        connection.exec_driver_sql("; ".join(changes))
        # A test that did damage could only put its CHECK constraints back unvalidated.
        unsure = text("SELECT conrelid::regclass, conname FROM pg_constraint WHERE NOT convalidated")
        for table_name, name in connection.execute(unsure).all():
            connection.execute(text(f"ALTER TABLE {table_name} VALIDATE CONSTRAINT {name}"))


@pytest.fixture(scope="session")
def sqlite_shared(quick_folder: Path) -> Iterator[Database]:
    """One SQLite database for all tests, in whose place an empty file is put before each: a Database remembers how its
    statements are written, which takes a new one longer than most tests."""
    database = Database(f"sqlite:///{quick_folder / 'shared.db'}")
    yield database
    database.close()


def _replace(database: Database, template: Path) -> None:
    database.close()
    path = Path(str(make_url(database.url).database))
    for old in path.parent.glob(f"{path.name}*"):
        old.unlink()
    shutil.copyfile(template, path)


@pytest.fixture(params=["sqlite", "postgresql"])
def fresh_database(request: pytest.FixtureRequest) -> Iterator[MakeDatabase]:
    """Gives a migrated, empty database each time, quickly: hundreds in one test. Only the latest may be used."""
    shared: Database = request.getfixturevalue("postgres_shared" if request.param == "postgresql" else "sqlite_shared")

    def fresh() -> Database:
        if request.param == "postgresql":
            _empty(shared)
        else:
            _replace(shared, request.getfixturevalue("sqlite_template"))
        return shared

    yield fresh
    if request.param == "sqlite":
        shared.close()


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
def sqlite_office(sqlite_template: Path, quick_folder: Path) -> Iterator[Office]:
    """One management API for all tests of a module that leave nothing behind that others would see."""
    path = Path(tempfile.mkdtemp(dir=quick_folder)) / "office.db"
    shutil.copyfile(sqlite_template, path)
    database = Database(f"sqlite:///{path}")
    yield Office(database)
    database.close()
