"""Table of charges of services, beside the transactions that they made."""

from __future__ import annotations

from sqlalchemy import BigInteger, CheckConstraint, Column, ForeignKey, Index, Table, Text, UniqueConstraint, text

from marketplace.store.base import metadata

service_charge = Table(
    "service_charge",
    metadata,
    Column("id", Text, primary_key=True),
    Column("service", Text, nullable=False),
    Column("provider", Text, nullable=False, comment="name of the provider who serves; empty for the platform itself"),
    Column("request_id", Text, nullable=False, comment="the service's own name for what it charges for"),
    Column("account_id", Text, ForeignKey("account.id"), nullable=False),
    Column("key_id", Text, nullable=False, comment="which service key asked"),
    Column("numerator", BigInteger, nullable=False, comment="of the amount in cents, as it was sent"),
    Column("denominator", BigInteger, nullable=False),
    Column("cost", BigInteger, nullable=False, comment="the amount in nano-units, rounded once"),
    Column("payable", BigInteger, nullable=False, comment="the part of the cost that is the provider's"),
    Column("tx_id", Text, ForeignKey("ledger_tx.id"), nullable=True, comment="null for what rounds to nothing"),
    Column("usage_metadata", Text, nullable=True),
    Column("at", BigInteger, nullable=False),
    CheckConstraint("payable >= 0 AND payable <= cost", name="shares_possible"),
    CheckConstraint("(cost = 0) = (tx_id IS NULL)", name="posted_where_it_costs"),
    UniqueConstraint("service", "provider", "request_id"),
)
Index(
    "ix_service_charge_tx",
    service_charge.c.tx_id,
    unique=True,
    sqlite_where=text("tx_id IS NOT NULL"),
    postgresql_where=text("tx_id IS NOT NULL"),
)
