"""Every test of this room that touches a database runs on SQLite and on a real PostgreSQL."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text

from marketplace.store.db import Database

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
            connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {source} STRATEGY FILE_COPY"))
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


@pytest.fixture
def database(make_database: MakeDatabase) -> Database:
    """One migrated, empty database."""
    return make_database()
