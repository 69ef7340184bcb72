"""Providers and their people, what an account has spent, and people who were erased."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

TABLES = ("provider", "provider_member", "provider_customer")


def upgrade() -> None:
    present = set(sa.inspect(op.get_bind()).get_table_names())
    assert not present & set(TABLES), f"tables of an unknown origin are in the way: {sorted(present & set(TABLES))}"
    op.add_column("users", sa.Column("erased_at", sa.BigInteger(), nullable=True, comment="since when it names nobody"))
    living = sa.text("erased_at IS NULL")
    op.create_index(
        "ix_users_living", "users", ["created_at", "id"], unique=False, sqlite_where=living, postgresql_where=living
    )
    op.add_column(
        "account",
        sa.Column(
            "spent",
            sa.BigInteger(),
            nullable=False,
            server_default="0",
            comment="what was paid for use, less refunds",
        ),
    )
    sum_what_was_spent()
    create_tables()
    present = set(sa.inspect(op.get_bind()).get_table_names())
    assert present >= set(TABLES), f"tables missing: {sorted(set(TABLES) - present)}"


def sum_what_was_spent() -> None:
    """Give every account the sum that is kept from now on: its entries in transactions that brought no funds."""
    op.execute(
        "UPDATE account SET spent = COALESCE((SELECT -SUM(e.amount) FROM entry e "
        "WHERE e.account_id = account.id AND e.tx_id NOT IN (SELECT f.tx_id FROM entry f "
        "JOIN account a ON a.id = f.account_id WHERE a.kind IN ('clearing', 'promo_expense'))), 0) "
        "WHERE kind = 'customer'"
    )


def create_tables() -> None:
    op.create_table(
        "provider",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False, comment="as it was written"),
        sa.Column("name_key", sa.Text(), nullable=False, comment="case-folded, for comparing"),
        sa.Column("logo_url", sa.Text(), nullable=True),
        sa.Column("website", sa.Text(), nullable=True),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_provider")),
        sa.UniqueConstraint("name_key", name=op.f("uq_provider_name_key")),
    )
    op.create_index("ix_provider_created", "provider", ["created_at", "id"], unique=False)
    op.create_table(
        "provider_member",
        sa.Column("user_id", sa.Text(), nullable=False, comment="a person acts for one provider at most"),
        sa.Column("provider_id", sa.Text(), nullable=False),
        sa.Column("is_root", sa.Boolean(), nullable=False, comment="answers for the provider; cannot be erased"),
        sa.Column("joined_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_provider_member_user_id")),
        sa.ForeignKeyConstraint(["provider_id"], ["provider.id"], name=op.f("fk_provider_member_provider_id")),
        sa.PrimaryKeyConstraint("user_id", name=op.f("pk_provider_member")),
    )
    op.create_index("ix_provider_member_provider", "provider_member", ["provider_id", "joined_at"], unique=False)
    op.create_table(
        "provider_customer",
        sa.Column("provider_id", sa.Text(), nullable=False),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("since", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["provider_id"], ["provider.id"], name=op.f("fk_provider_customer_provider_id")),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_provider_customer_user_id")),
        sa.PrimaryKeyConstraint("provider_id", "user_id", name=op.f("pk_provider_customer")),
    )
    op.create_index("ix_provider_customer_user", "provider_customer", ["user_id"], unique=False)
