"""Mail that waits to be sent, addresses that are verified, tokens sent by mail, who was told of a low balance.

Whoever was there before is taken to have a verified address: they have been signing in.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

TABLES = ("outbox", "email_token", "low_balance")


def upgrade() -> None:
    present = set(sa.inspect(op.get_bind()).get_table_names())
    assert not present & set(TABLES), f"tables of an unknown origin are in the way: {sorted(present & set(TABLES))}"
    op.add_column(
        "users",
        sa.Column(
            "email_verified_at",
            sa.BigInteger(),
            nullable=True,
            comment="null until the address is known to be theirs",
        ),
    )
    users = sa.table("users", sa.column("email_verified_at"), sa.column("created_at"))
    op.execute(users.update().values(email_verified_at=users.c.created_at))
    create_outbox()
    create_rest()


def create_outbox() -> None:
    op.create_table(
        "outbox",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("template", sa.Text(), nullable=False),
        sa.Column("recipient", sa.Text(), nullable=False, comment="address; emptied when the mail is finished"),
        sa.Column(
            "payload", sa.Text(), nullable=False, comment="JSON object of texts; emptied when the mail is finished"
        ),
        sa.Column("user_id", sa.Text(), nullable=True, comment="the person it goes to, where known"),
        sa.Column("dedupe", sa.Text(), nullable=True, comment="mails of one such name are sent once"),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column(
            "due_at", sa.BigInteger(), nullable=True, comment="next attempt, or the end of a lease; null when finished"
        ),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
        sa.Column("claim", sa.Text(), nullable=False, comment="who holds the lease"),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True, comment="sent, dropped or given up"),
        sa.Column("trouble", sa.Text(), nullable=False, comment="why the last attempt failed"),
        sa.CheckConstraint(
            "(due_at IS NULL) = (finished_at IS NOT NULL)", name=op.f("ck_outbox_finished_when_not_due")
        ),
        sa.CheckConstraint("(outcome IS NULL) = (finished_at IS NULL)", name=op.f("ck_outbox_outcome_when_finished")),
        sa.CheckConstraint("outcome IN ('sent', 'dropped', 'given up')", name=op.f("ck_outbox_outcome_known")),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_outbox_user_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
        sa.UniqueConstraint("dedupe", name=op.f("uq_outbox_dedupe")),
    )
    due, plain = sa.text("due_at IS NOT NULL"), sa.text("dedupe IS NULL")
    op.create_index("ix_outbox_due", "outbox", ["due_at", "id"], sqlite_where=due, postgresql_where=due)
    op.create_index("ix_outbox_finished", "outbox", ["finished_at"], sqlite_where=plain, postgresql_where=plain)
    op.create_index("ix_outbox_user", "outbox", ["user_id"])


def create_rest() -> None:
    op.create_table(
        "email_token",
        sa.Column("digest", sa.LargeBinary(), nullable=False, comment="SHA-256 of the token"),
        sa.Column("user_id", sa.Text(), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("purpose IN ('verify', 'reset')", name=op.f("ck_email_token_purpose_known")),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_email_token_user_id")),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_email_token")),
    )
    op.create_index("ix_email_token_user", "email_token", ["user_id", "purpose"])
    op.create_index("ix_email_token_expires", "email_token", ["expires_at"])
    op.create_table(
        "low_balance",
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column(
            "armed", sa.Boolean(), nullable=False, comment="whether a fall below the threshold is still to be told"
        ),
        sa.Column("changed_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name=op.f("fk_low_balance_account_id")),
        sa.PrimaryKeyConstraint("account_id", name=op.f("pk_low_balance")),
    )
