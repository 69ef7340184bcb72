"""Tables of what rentals cost: money set aside for a reservation, meters of what runs, and every charge of a meter.
`rental_charge` is append-only."""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, CheckConstraint, Column, ForeignKey, Index, Table, Text, text

from marketplace.store.base import metadata

deposit = Table(
    "deposit",
    metadata,
    Column("id", Text, primary_key=True),
    Column("account_id", Text, ForeignKey("account.id"), nullable=False),
    Column("subject_id", Text, nullable=False, comment="the reservation"),
    Column("amount", BigInteger, nullable=False, comment="nano-units set aside, all of them or none"),
    Column("state", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("resolved_at", BigInteger, nullable=True),
    Column("tx_id", Text, ForeignKey("ledger_tx.id"), nullable=True, comment="what captured it"),
    CheckConstraint("state IN ('held', 'captured', 'released')", name="state_known"),
    CheckConstraint("(state = 'held') = (resolved_at IS NULL)", name="resolved_when_not_held"),
    CheckConstraint("amount > 0", name="amount_positive"),
)
_HELD = text("state = 'held'")
Index("ix_deposit_subject", deposit.c.subject_id, unique=True, sqlite_where=_HELD, postgresql_where=_HELD)
Index("ix_deposit_account", deposit.c.account_id, sqlite_where=_HELD, postgresql_where=_HELD)

rental_meter = Table(
    "rental_meter",
    metadata,
    Column("id", Text, primary_key=True),
    Column("resource_type", Text, nullable=False),
    Column("resource_id", Text, nullable=False),
    Column("resource_name", Text, nullable=False),
    Column("account_id", Text, ForeignKey("account.id"), nullable=False),
    Column("provider_id", Text, ForeignKey("provider.id"), nullable=True, comment="null where all is the platform's"),
    Column("share", BigInteger, nullable=False, comment="the provider's part in basis points"),
    Column("rate", BigInteger, nullable=False, comment="nano-units per `per_us`"),
    Column("per_us", BigInteger, nullable=False),
    Column("exempt", Boolean, nullable=False, comment="its time is counted, and costs nothing"),
    Column("free_until", BigInteger, nullable=True, comment="up to here it is paid, or covered, by something else"),
    Column("started_at", BigInteger, nullable=False),
    Column("metered_to", BigInteger, nullable=False),
    Column("stopped_at", BigInteger, nullable=True),
    Column("remainder", BigInteger, nullable=False, comment="of the division by `per_us`: carried, never lost"),
    Column("charged_us", BigInteger, nullable=False, comment="time that was charged for"),
    Column("charged", BigInteger, nullable=False, comment="nano-units of all its charges"),
    Column("unpaid_since", BigInteger, nullable=True, comment="since when its account could not pay all of it"),
    CheckConstraint("resource_type IN ('Compute', 'Volume')", name="resource_type_known"),
    CheckConstraint("rate >= 0 AND per_us > 0 AND remainder >= 0 AND remainder < per_us", name="rate_possible"),
    CheckConstraint("metered_to >= started_at AND (stopped_at IS NULL OR stopped_at >= started_at)", name="forward"),
)
_RUNNING = text("stopped_at IS NULL")
Index("ix_rental_meter_running", rental_meter.c.metered_to, sqlite_where=_RUNNING, postgresql_where=_RUNNING)
Index(
    "ix_rental_meter_resource",
    rental_meter.c.resource_id,
    unique=True,
    sqlite_where=_RUNNING,
    postgresql_where=_RUNNING,
)
Index("ix_rental_meter_account", rental_meter.c.account_id, sqlite_where=_RUNNING, postgresql_where=_RUNNING)

rental_charge = Table(
    "rental_charge",
    metadata,
    Column("tx_id", Text, ForeignKey("ledger_tx.id"), primary_key=True),
    Column("meter_id", Text, ForeignKey("rental_meter.id"), nullable=False),
    Column("begin_at", BigInteger, nullable=False),
    Column("end_at", BigInteger, nullable=False),
    Column("carried", BigInteger, nullable=False, comment="remainder before it"),
    Column("remainder", BigInteger, nullable=False, comment="remainder after it"),
    Column("amount", BigInteger, nullable=False, comment="nano-units"),
    Column("payable", BigInteger, nullable=False, comment="the part of it that is the provider's"),
    Column("written_off", BigInteger, nullable=False, comment="the part of it that the account could not pay"),
    CheckConstraint("begin_at <= end_at AND amount > 0", name="possible"),
    CheckConstraint("payable >= 0 AND payable <= amount", name="shares_possible"),
    CheckConstraint("written_off >= 0 AND written_off <= amount", name="written_off_possible"),
)
Index("ix_rental_charge_meter", rental_charge.c.meter_id, rental_charge.c.begin_at)

APPEND_ONLY = ("rental_charge",)
