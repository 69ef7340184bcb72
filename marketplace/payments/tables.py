"""Tables of payments: what was intended, what was given back, and what payment providers told about either."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, CheckConstraint, Column, ForeignKey, Index, Table, Text, text

from marketplace.store.base import metadata

payment = Table(
    "payment",
    metadata,
    Column("id", Text, primary_key=True),
    Column("provider", Text, nullable=False, comment="which payment provider"),
    Column("reference", Text, nullable=True, comment="the provider's id of it; null until the provider answered"),
    Column("payer_kind", Text, nullable=False),
    Column("payer_id", Text, nullable=False, comment="user or team whose account it tops up"),
    Column("account_id", Text, ForeignKey("account.id"), nullable=False),
    Column("created_by", Text, nullable=True, comment="the person who asked; null for a key of a team"),
    Column("amount_cents", BigInteger, nullable=False),
    Column("currency", Text, nullable=False),
    Column("save_card", Boolean, nullable=False),
    Column("state", Text, nullable=False),
    Column("tx_id", Text, ForeignKey("ledger_tx.id"), nullable=True, comment="the transaction that credited it"),
    Column("created_at", BigInteger, nullable=False),
    Column("paid_at", BigInteger, nullable=True),
    Column("checked_at", BigInteger, nullable=False, comment="when the provider was last asked about it"),
    CheckConstraint("state IN ('creating', 'pending', 'succeeded', 'canceled', 'mismatched')", name="state_known"),
    CheckConstraint("(state = 'succeeded') = (tx_id IS NOT NULL)", name="credited_when_succeeded"),
    CheckConstraint("(state = 'succeeded') = (paid_at IS NOT NULL)", name="paid_when_succeeded"),
    CheckConstraint("amount_cents > 0", name="amount_positive"),
)
Index("ix_payment_account", payment.c.account_id, payment.c.created_at, payment.c.id)
Index("ix_payment_created", payment.c.created_at, payment.c.id)
Index(
    "ix_payment_reference",
    payment.c.provider,
    payment.c.reference,
    unique=True,
    sqlite_where=text("reference IS NOT NULL"),
    postgresql_where=text("reference IS NOT NULL"),
)
Index(
    "ix_payment_tx",
    payment.c.tx_id,
    unique=True,
    sqlite_where=text("tx_id IS NOT NULL"),
    postgresql_where=text("tx_id IS NOT NULL"),
)
Index(
    "ix_payment_open",
    payment.c.checked_at,
    sqlite_where=text("state IN ('creating', 'pending')"),
    postgresql_where=text("state IN ('creating', 'pending')"),
)

payment_refund = Table(
    "payment_refund",
    metadata,
    Column("id", Text, primary_key=True),
    Column("payment_id", Text, ForeignKey("payment.id"), nullable=False),
    Column("amount_cents", BigInteger, nullable=False),
    Column("reason", Text, nullable=False),
    Column("origin", Text, nullable=False, comment="admin, or the provider where it was made"),
    Column("state", Text, nullable=False),
    Column("reference", Text, nullable=True, comment="the provider's id of it, where it is known"),
    Column("written_off", BigInteger, nullable=False, comment="nano-units that the account could not cover"),
    Column("tx_id", Text, ForeignKey("ledger_tx.id"), nullable=False),
    Column("undone_tx_id", Text, ForeignKey("ledger_tx.id"), nullable=True, comment="of a refund that failed"),
    Column("created_at", BigInteger, nullable=False),
    Column("checked_at", BigInteger, nullable=False),
    CheckConstraint("origin IN ('admin', 'provider')", name="origin_known"),
    CheckConstraint("state IN ('pending', 'succeeded', 'failed')", name="state_known"),
    CheckConstraint("(state = 'failed') = (undone_tx_id IS NOT NULL)", name="undone_when_failed"),
    CheckConstraint("amount_cents > 0", name="amount_positive"),
)
Index("ix_payment_refund_payment", payment_refund.c.payment_id, payment_refund.c.created_at)
Index("ix_payment_refund_tx", payment_refund.c.tx_id, unique=True)
Index(
    "ix_payment_refund_open",
    payment_refund.c.checked_at,
    sqlite_where=text("state = 'pending'"),
    postgresql_where=text("state = 'pending'"),
)

payment_event = Table(
    "payment_event",
    metadata,
    Column("provider", Text, primary_key=True),
    Column("event_id", Text, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("payment_id", Text, nullable=True),
    Column("outcome", Text, nullable=False),
    Column("request_id", Text, nullable=False, comment="the delivery that was applied"),
    Column("received_at", BigInteger, nullable=False),
)

payment_customer = Table(
    "payment_customer",
    metadata,
    Column("provider", Text, primary_key=True),
    Column("account_id", Text, ForeignKey("account.id"), primary_key=True),
    Column("reference", Text, nullable=False, comment="the provider's id of who pays, whose cards it keeps"),
)
