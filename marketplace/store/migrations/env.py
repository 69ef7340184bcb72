"""Alembic's environment: the connection comes from marketplace.store.migrate, which also owns the transaction."""

from __future__ import annotations

from alembic import context

from marketplace.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    # SQLite alters a table by copying it; the same migration file then serves both databases.
    render_as_batch=True,
    transactional_ddl=True,
)
context.run_migrations()
