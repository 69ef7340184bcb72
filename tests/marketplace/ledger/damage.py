"""Damage to books that no code of Headrace could do: raw SQL, with everything that guards them out of the way."""

from __future__ import annotations

import sqlite3

from sqlalchemy import text

from tests.marketplace.shop import Shop


def damage(shop: Shop, *statements: str, **values: object) -> None:
    """Run statements with triggers, foreign keys and CHECK constraints out of the way, and put the triggers back."""
    if shop.database.dialect == "sqlite":
        shop.database.close()
        raw = sqlite3.connect(shop.database.url.removeprefix("sqlite:///"), isolation_level=None)
        raw.execute("PRAGMA ignore_check_constraints=ON")
        triggers = raw.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            raw.execute(f"DROP TRIGGER {name}")
        for statement in statements:
            raw.execute(statement, values)
        for _, sql in triggers:
            raw.execute(sql)
        raw.close()
        return
    with shop.database._writer.begin() as connection:
        checks = connection.exec_driver_sql(
            "SELECT conrelid::regclass, conname, pg_get_constraintdef(oid) FROM pg_constraint "
            "WHERE contype = 'c' AND connamespace = 'public'::regnamespace"
        ).all()
        for table, name, _ in checks:
            connection.exec_driver_sql(f"ALTER TABLE {table} DROP CONSTRAINT {name}")
        connection.exec_driver_sql("SET LOCAL session_replication_role = replica")
        for statement in statements:
            connection.execute(text(statement), values)
        for table, name, definition in checks:
            connection.exec_driver_sql(
                f"ALTER TABLE {table} ADD CONSTRAINT {name} {definition.removesuffix(' NOT VALID')} NOT VALID"
            )
