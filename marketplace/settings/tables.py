"""Table of settings: one row for each that was changed; the others have their defaults."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Table, Text

from marketplace.store.base import metadata

app_setting = Table(
    "app_setting",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False, comment="JSON"),
    Column("updated_at", BigInteger, nullable=False),
)
