"""Alembic, run by the program itself: no ini file, no command line, one transaction for the whole upgrade."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, Engine, text

from marketplace.store.db import StoreError

_LOCK = 0x68656164  # the same number for every process of this program that migrates this PostgreSQL database


def upgrade(engine: Engine) -> str:
    """Bring the schema to head and return its revision.

    One process at a time: SQLite's BEGIN IMMEDIATE locks the file, PostgreSQL takes an advisory lock until commit. A
    failing migration leaves the schema as it was, because DDL is transactional on both.
    """
    with engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        revision = current_revision(connection)
    if revision is None:
        raise StoreError("the migration left no revision behind")
    return revision


def current_revision(connection: Connection) -> str | None:
    """Return the schema's revision, None for a database that was never migrated."""
    return MigrationContext.configure(connection).get_current_revision()
