"""Settings of the platform, payments, charges of services."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    create_settings_and_charges()
    create_payments()


def create_settings_and_charges() -> None:
    op.create_table(
        "app_setting",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False, comment="JSON"),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_app_setting")),
    )
    op.create_table(
        "service_charge",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("service", sa.Text(), nullable=False),
        sa.Column(
            "provider",
            sa.Text(),
            nullable=False,
            comment="name of the provider who serves; empty for the platform itself",
        ),
        sa.Column("request_id", sa.Text(), nullable=False, comment="the service's own name for what it charges for"),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False, comment="which service key asked"),
        sa.Column("numerator", sa.BigInteger(), nullable=False, comment="of the amount in cents, as it was sent"),
        sa.Column("denominator", sa.BigInteger(), nullable=False),
        sa.Column("cost", sa.BigInteger(), nullable=False, comment="the amount in nano-units, rounded once"),
        sa.Column("payable", sa.BigInteger(), nullable=False, comment="the part of the cost that is the provider's"),
        sa.Column("tx_id", sa.Text(), nullable=True, comment="null for what rounds to nothing"),
        sa.Column("usage_metadata", sa.Text(), nullable=True),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("(cost = 0) = (tx_id IS NULL)", name=op.f("ck_service_charge_posted_where_it_costs")),
        sa.CheckConstraint("payable >= 0 AND payable <= cost", name=op.f("ck_service_charge_shares_possible")),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name=op.f("fk_service_charge_account_id")),
        sa.ForeignKeyConstraint(["tx_id"], ["ledger_tx.id"], name=op.f("fk_service_charge_tx_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_service_charge")),
        sa.UniqueConstraint(
            "service", "provider", "request_id", name=op.f("uq_service_charge_service_provider_request_id")
        ),
    )
    op.create_index(
        "ix_service_charge_tx",
        "service_charge",
        ["tx_id"],
        unique=True,
        sqlite_where=sa.text("tx_id IS NOT NULL"),
        postgresql_where=sa.text("tx_id IS NOT NULL"),
    )


def create_payments() -> None:
    op.create_table(
        "payment_event",
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("payment_id", sa.Text(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False, comment="the delivery that was applied"),
        sa.Column("received_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("provider", "event_id", name=op.f("pk_payment_event")),
    )
    op.create_table(
        "payment_customer",
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column(
            "reference", sa.Text(), nullable=False, comment="the provider's id of who pays, whose cards it keeps"
        ),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name=op.f("fk_payment_customer_account_id")),
        sa.PrimaryKeyConstraint("provider", "account_id", name=op.f("pk_payment_customer")),
    )
    op.create_table(
        "payment",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False, comment="which payment provider"),
        sa.Column(
            "reference", sa.Text(), nullable=True, comment="the provider's id of it; null until the provider answered"
        ),
        sa.Column("payer_kind", sa.Text(), nullable=False),
        sa.Column("payer_id", sa.Text(), nullable=False, comment="user or team whose account it tops up"),
        sa.Column("account_id", sa.Text(), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=True, comment="the person who asked; null for a key of a team"),
        sa.Column("amount_cents", sa.BigInteger(), nullable=False),
        sa.Column("currency", sa.Text(), nullable=False),
        sa.Column("save_card", sa.Boolean(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("tx_id", sa.Text(), nullable=True, comment="the transaction that credited it"),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("paid_at", sa.BigInteger(), nullable=True),
        sa.Column("checked_at", sa.BigInteger(), nullable=False, comment="when the provider was last asked about it"),
        sa.CheckConstraint(
            "(state = 'succeeded') = (paid_at IS NOT NULL)", name=op.f("ck_payment_paid_when_succeeded")
        ),
        sa.CheckConstraint(
            "(state = 'succeeded') = (tx_id IS NOT NULL)", name=op.f("ck_payment_credited_when_succeeded")
        ),
        sa.CheckConstraint(
            "state IN ('creating', 'pending', 'succeeded', 'canceled', 'mismatched')",
            name=op.f("ck_payment_state_known"),
        ),
        sa.CheckConstraint("amount_cents > 0", name=op.f("ck_payment_amount_positive")),
        sa.ForeignKeyConstraint(["account_id"], ["account.id"], name=op.f("fk_payment_account_id")),
        sa.ForeignKeyConstraint(["tx_id"], ["ledger_tx.id"], name=op.f("fk_payment_tx_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_payment")),
    )
    op.create_index("ix_payment_account", "payment", ["account_id", "created_at", "id"], unique=False)
    op.create_index("ix_payment_created", "payment", ["created_at", "id"], unique=False)
    op.create_index(
        "ix_payment_open",
        "payment",
        ["checked_at"],
        unique=False,
        sqlite_where=sa.text("state IN ('creating', 'pending')"),
        postgresql_where=sa.text("state IN ('creating', 'pending')"),
    )
    op.create_index(
        "ix_payment_reference",
        "payment",
        ["provider", "reference"],
        unique=True,
        sqlite_where=sa.text("reference IS NOT NULL"),
        postgresql_where=sa.text("reference IS NOT NULL"),
    )
    op.create_index(
        "ix_payment_tx",
        "payment",
        ["tx_id"],
        unique=True,
        sqlite_where=sa.text("tx_id IS NOT NULL"),
        postgresql_where=sa.text("tx_id IS NOT NULL"),
    )
    op.create_table(
        "payment_refund",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("payment_id", sa.Text(), nullable=False),
        sa.Column("amount_cents", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("origin", sa.Text(), nullable=False, comment="admin, or the provider where it was made"),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reference", sa.Text(), nullable=True, comment="the provider's id of it, where it is known"),
        sa.Column(
            "written_off", sa.BigInteger(), nullable=False, comment="nano-units that the account could not cover"
        ),
        sa.Column("tx_id", sa.Text(), nullable=False),
        sa.Column("undone_tx_id", sa.Text(), nullable=True, comment="of a refund that failed"),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("checked_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "(state = 'failed') = (undone_tx_id IS NOT NULL)", name=op.f("ck_payment_refund_undone_when_failed")
        ),
        sa.CheckConstraint("origin IN ('admin', 'provider')", name=op.f("ck_payment_refund_origin_known")),
        sa.CheckConstraint("state IN ('pending', 'succeeded', 'failed')", name=op.f("ck_payment_refund_state_known")),
        sa.CheckConstraint("amount_cents > 0", name=op.f("ck_payment_refund_amount_positive")),
        sa.ForeignKeyConstraint(["payment_id"], ["payment.id"], name=op.f("fk_payment_refund_payment_id")),
        sa.ForeignKeyConstraint(["tx_id"], ["ledger_tx.id"], name=op.f("fk_payment_refund_tx_id")),
        sa.ForeignKeyConstraint(["undone_tx_id"], ["ledger_tx.id"], name=op.f("fk_payment_refund_undone_tx_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_payment_refund")),
    )
    op.create_index(
        "ix_payment_refund_open",
        "payment_refund",
        ["checked_at"],
        unique=False,
        sqlite_where=sa.text("state = 'pending'"),
        postgresql_where=sa.text("state = 'pending'"),
    )
    op.create_index("ix_payment_refund_payment", "payment_refund", ["payment_id", "created_at"], unique=False)
    op.create_index("ix_payment_refund_tx", "payment_refund", ["tx_id"], unique=True)
