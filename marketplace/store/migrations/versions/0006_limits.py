"""Keys that share a budget with those they replace, and keys of nodes and services."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

COLUMNS = (
    ("lineage", "first key of those that replaced one another: they share a budget"),
    ("service", "of a service's key: what it may charge for"),
    ("provider", "of a node's or service's key: the provider that it belongs to"),
)


def upgrade() -> None:
    for name, comment in COLUMNS:
        op.add_column("api_key", sa.Column(name, sa.Text(), nullable=True, comment=comment))
    if op.get_bind().dialect.name == "postgresql":
        op.alter_column("api_key", "budget_period", comment="day, week, month or total")
    op.create_index(
        "ix_api_key_lineage",
        "api_key",
        ["lineage"],
        unique=False,
        sqlite_where=sa.text("lineage IS NOT NULL"),
        postgresql_where=sa.text("lineage IS NOT NULL"),
    )
    op.create_index(
        "ix_api_key_machine",
        "api_key",
        ["kind", "created_at", "id"],
        unique=False,
        sqlite_where=sa.text("kind IN ('node', 'service')"),
        postgresql_where=sa.text("kind IN ('node', 'service')"),
    )
    present = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("api_key")}
    assert present >= {name for name, _ in COLUMNS}, "columns of api_key are missing"
